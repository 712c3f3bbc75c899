"""The shape of a decoder, out of a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxspec.config.errors import ConfigError
from jaxspec.config.keys import check_keys, without_nulls
from jaxspec.config.latent import LatentConfig
from jaxspec.config.moe import MoeConfig
from jaxspec.config.rope import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, in the names of `config.json`.

    Attributes:
      layer_types: "full_attention" or "sliding_attention" per layer.
      sliding_window: positions that a sliding layer sees, or None.
      local_rope: rope of the sliding layers, where it differs from that of the others.
      compress_ratios: positions per compressed entry, for every layer; 1 for a layer without them. Empty in
        families that compress nothing.
      qkv_bias: queries, keys and values have biases; with `attention_bias` so has the output projection.
      attention_scale: what dot products are multiplied by; None takes head_dim ** -0.5.
      attention_sinks: every head has a logit of its own in the softmax.
      moe: the routed experts, or None where every layer is dense.
      latent: latent attention, or None; `head_dim` is then the size of the rotated part.
      num_nextn_predict_layers: layers past the last one that a checkpoint may hold to predict further tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    local_rope: RopeConfig | None = None
    compress_ratios: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(f"layer_types: unknown kind {unknown[0]!r}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("layer_types has 'sliding_attention', but sliding_window is not set")
        if any(not isinstance(ratio, int) or ratio < 1 for ratio in self.compress_ratios):
            raise ConfigError(f"compress_ratios must be integers from 1 on, got {list(self.compress_ratios)}")
        if self.compress_ratios and not self.sliding_window:
            raise ConfigError("compress_ratios is set, but sliding_window is not")
        if len(self.compress_ratios) not in (0, self.num_hidden_layers):
            raise ConfigError(
                f"compress_ratios has {len(self.compress_ratios)} entries for {self.num_hidden_layers} layers"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the `config.json` of a decoder; absent keys take transformers' defaults.

        Of a model that also sees images, the keys of its language model count.

        Raises:
          ConfigError: a key that must be there is missing, is of another type or size than it may be, or
            asks for what is not built.
        """
        check_keys(config)
        config = without_nulls(config.get("text_config") or config)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ConfigError(f"model_type {family!r} is not supported; supported: {known}")
        shape = FAMILIES[family].read_config(config)
        for rope in filter(None, (shape.rope, shape.local_rope)):
            rope.check(shape.head_dim)
        return shape


class Family(Protocol):
    """What reading a `config.json` has to know of a family."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Raises ConfigError: a key that must be there is missing, or asks for what is not built."""
        ...


FAMILIES: dict[str, type[Family]] = {}
"""Every family by its `model_type`; `jaxspec.register_family` fills it."""
