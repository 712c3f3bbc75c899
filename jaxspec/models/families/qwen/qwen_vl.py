"""The language models of Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with a rope for images.

Text has ordinary rope (see `RopeConfig.from_hf`).

Source: the `Qwen2_5_VLForConditionalGeneration` and `Qwen3VLForConditionalGeneration` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.config import RopeConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.families.qwen.qwen2 import Qwen2
from jaxspec.models.families.qwen.qwen3 import QK_NORMS, Qwen3


def _as_family(model_type: str) -> Any:
    """A GGUF holds the language model alone, which is a model of the family without images."""

    def config(meta: Metadata) -> dict[str, Any]:
        return {"model_type": model_type}

    return config


class Qwen25VL(Qwen2):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 80,
    }
    gguf = GGUFArchitecture("qwen2vl", "Qwen2ForCausalLM", config=_as_family("qwen2"))

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().own_fields(config), "rope": RopeConfig.from_hf(config, default_theta=1e6)}


class Qwen3VL(Qwen3):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
    }
    has_windows = False
    gguf = GGUFArchitecture("qwen3vl", "Qwen3ForCausalLM", QK_NORMS, config=_as_family("qwen3"))

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().own_fields(config), "rope": RopeConfig.from_hf(config, default_theta=5e5)}
