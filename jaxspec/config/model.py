"""The shape of a decoder, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

from jaxspec.config.compressed import CompressedConfig
from jaxspec.config.delta import DeltaConfig
from jaxspec.config.errors import ConfigError
from jaxspec.config.keys import UNCHANGED, Keys, check_keys, without_nulls
from jaxspec.config.latent import LatentConfig
from jaxspec.config.moe import MoeConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.config.streams import StreamsConfig
from jaxspec.errors import page
from jaxspec.registry import Registry
from jaxspec.spelling import known_names


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Fields that are not listed have the meaning of the same key in `config.json`.

    A family adds fields of its own in a subclass (`Decoder.config_type`).

    Attributes:
      family: `model_type`, a name in `FAMILIES`.
      layer_types: for every layer one of `layer_kinds` or, with `delta`, "linear_attention".
      sliding_window: positions that a sliding layer sees, or None.
      local_rope: rope of the sliding layers, if it differs from that of the others.
      attention_bias: all projections of attention have biases, including the output projection.
      qkv_bias: the projections of queries, keys and values have biases.
      mlp_bias: the projections of the feed-forward network have biases.
      qk_norm: queries and keys are normalised before rope.
      attention_scale: the factor of attention logits; None takes head_dim ** -0.5.
      attention_sinks: every head has an additional, learned logit in the softmax.
      moe: the routed experts; None if every layer is dense.
      delta: the sizes of layers of gated delta rules; None without such layers.
      latent: latent attention, or None; `head_dim` is then the size of the rotated part.
      compressed: attention over compressed entries, or None; `head_dim` is then the size of the rotated part,
        `rope` that of layers with entries and `local_rope` that of the others.
      streams: several residual streams with hyper-connections, or None for one.
      kv_copies: how often each key/value head is held, with a part of its queries each; see `over`.
      embedding_scale: factor of token embeddings, as far as it belongs to the embedding in transformers.
      num_nextn_predict_layers: multi-token-prediction layers that the checkpoint holds after the last layer.
      unread: keys of `config.json` that nothing reads, and of which it is not known that they mean nothing.
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
    attention_scale: float | None = None
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    latent: LatentConfig | None = None
    compressed: CompressedConfig | None = None
    streams: StreamsConfig | None = None
    kv_copies: int = 1
    embedding_scale: float = 1.0
    num_nextn_predict_layers: int = 0
    unread: tuple[str, ...] = field(default=(), compare=False)
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

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
        known = {*self.layer_kinds, *(["linear_attention"] if self.delta else [])}
        unknown = sorted(set(self.layer_types) - known)
        if unknown:
            raise ConfigError(f"layer_types: unknown kind {unknown[0]!r}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("layer_types has 'sliding_attention', but sliding_window is not set")

    @property
    def num_cached_heads(self) -> int:
        """The number of key/value heads that are held and cached, copies included."""
        return self.num_key_value_heads * self.kv_copies

    def over(self, devices: int) -> "ModelConfig":
        """The shape on so many devices: if they outnumber the key/value heads, each device has a copy of one
        head and a part of its queries, where that divides evenly."""
        copies, left = divmod(devices, self.num_key_value_heads)
        group = self.num_attention_heads // self.num_key_value_heads
        has_one_vector = self.latent is not None or self.compressed is not None
        if has_one_vector or left or not copies or group % copies:
            return self
        return replace(self, kv_copies=copies)

    def within(self, length: int | None) -> "ModelConfig":
        """The shape for texts of at most so many positions (see `RopeConfig.length`); unchanged for None."""
        return self if length is None else replace(self, rope=self.rope.within(length))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the `config.json` of a decoder; absent keys take transformers' defaults.

        For a model that also takes images, the keys of its language model are read: `text_config`, or, in
        older files, all keys beside `vision_config`.

        Raises:
          ConfigError: a required key is missing, or a value has the wrong type, is out of range or is not
            supported.
        """
        check_keys(config)
        is_tied = bool(config.get("tie_word_embeddings"))
        text = config.get("text_config") or config
        keys = text if isinstance(text, Keys) else Keys(text)
        # transformers 5 says so beside the language model's keys, older versions among them.
        config = keys.with_values(without_nulls(text) | ({"tie_word_embeddings": True} if is_tied else {}))
        family = config.get("model_type")
        if "vision_config" in config and f"{family}_text" in FAMILIES:
            family = f"{family}_text"
            config = config.with_values(dict(config.items()) | {"model_type": family})
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(
                f"model_type {family!r} is not supported; {known_names(str(family), FAMILIES)}; "
                f"to add a family: {page('adding-a-family.md')}"
            )
        shape: ModelConfig = FAMILIES[family].read_config(config)
        for rope in filter(None, (shape.rope, shape.local_rope)):
            rope.check(shape.head_dim)
        # Whoever gives `Keys` reads others of them, too.
        return shape if keys is text else replace(shape, unread=_unread(keys, family))


def _unread(keys: Keys, family: str) -> tuple[str, ...]:
    """The keys of a model that a family does not read, though they may mean something.

    Raises:
      ConfigError: one changes what is computed.
    """
    unread = keys.unread()
    unchanged = dict(UNCHANGED)
    inherited = {each.name for each in fields(ModelConfig)}
    for other in FAMILIES.values():
        own = (each for each in fields(other.config_type) if each.name not in inherited)
        unchanged |= {each.name: each.default for each in own}
    for key, value in unread.items():
        if key in unchanged and value != unchanged[key]:
            raise ConfigError(f"config.json: {key} {value!r} is not supported for model_type {family!r}")
    return tuple(key for key in unread if key not in unchanged)


class Family(Protocol):
    """What reading a `config.json` needs from a family."""

    config_type: type[ModelConfig]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The shape of a model of this family.

        Raises:
          ConfigError: a required key is missing, or a value is not supported.
        """
        ...


FAMILIES = Registry("jaxspec.models")
"""Every family by its `model_type`; `jaxspec.register_family` fills it."""
