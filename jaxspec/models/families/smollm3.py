"""SmolLM3: Llama in which every fourth layer has no rotary embedding.

Source: the `SmolLM3ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder


@dataclass(frozen=True)
class SmolLM3Config(ModelConfig):
    """Adds a key of this family.

    Attributes:
      no_rope_layers: for every layer, 1 with and 0 without rotary embedding.
    """

    no_rope_layers: tuple[int, ...] = ()


class SmolLM3(Decoder):
    """A target network."""

    config_type = SmolLM3Config
    defaults: ClassVar = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    }
    # llama.cpp knows no other interval either.
    gguf = GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", interleaved=True)

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return not _has_rope(config)[layer]

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"no_rope_layers": _has_rope(config), "rope": RopeConfig.from_hf(config, default_theta=2e6)}

    @classmethod
    def layer_ropes(cls, config: Any) -> tuple[RopeConfig | None, ...]:
        return tuple(config.rope if has_rope else None for has_rope in config.no_rope_layers)


def _has_rope(config: Mapping[str, Any]) -> tuple[int, ...]:
    """For every layer, whether it has a rotary embedding.

    Raises:
      ConfigError: the list of the config is shorter than its layers.
    """
    count, stated = config["num_hidden_layers"], config.get("no_rope_layers")
    if stated is None:
        return tuple(int((layer + 1) % config["no_rope_layer_interval"] > 0) for layer in range(count))
    if len(stated) < count:
        raise ConfigError(f"no_rope_layers has {len(stated)} entries for {count} layers")
    return tuple(stated[:count])
