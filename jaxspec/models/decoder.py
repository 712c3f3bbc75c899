"""The base class of all families of target networks: reads a `config.json` and runs a stack of layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    CacheShape,
    FullAttention,
    LayerCacheShape,
    SlidingWindow,
)
from jaxspec.config import ConfigError, ModelConfig, RopeConfig, joined, own_values
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import (
    MLP,
    Attention,
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    TiedEmbedding,
    scaled,
)
from jaxspec.models.mtp_names import NEXT_LAYER, MtpNames
from jaxspec.sharding import PendingSum, total
from jaxspec.weights.parameters import product

LAST_STREAMS = -1
"""In `capture`, the residual stream after the last layer; of several, all side by side, [N', streams * M]."""


class Decoder(nnx.Module):
    """A target network; by default, pre-norm layers of grouped-query attention.

    A family is a subclass. It gives the defaults of its `config.json`, says how the other keys are read, and
    builds its layers.

    Attributes:
      defaults: values for keys that a `config.json` leaves out, as in the family's configuration class of
        transformers 5.23.
      config_type: `ModelConfig`, or a subclass with fields of the family's own, read from the keys of
        `config.json` with their names.
      activation: the `config.json` key of the feed-forward activation, and its only supported value.
      recycles_normed: for a family with an MTP layer: whether that layer, when it drafts several tokens,
        reads its own output after its last norm (True) or before it (False). None for other families.
      mtp_names: the names of that layer's tensors.
      gguf: how GGUFs store the family's models; None if they are not supported.
      attention_type, moe_type: the classes of a layer's attention and, for a config with experts, of its
        feed-forward network.
      norm_type, norm_name: the class of the final norm, and its name in a checkpoint.
      built: keys that are refused for other families, and which the family has.
      has_windows: whether attention may have a sliding window; if not, its size is ignored.
      kinds: the kind of attention of every layer.
      ropes: the rotary embedding of every layer; None for a layer without one.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    config_type: ClassVar[type[ModelConfig]] = ModelConfig
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")
    recycles_normed: ClassVar[bool | None] = None
    mtp_names: ClassVar[MtpNames] = NEXT_LAYER
    gguf: ClassVar[GGUFArchitecture | None] = None
    attention_type: ClassVar[Callable[..., Any]] = Attention
    moe_type: ClassVar[Callable[..., Any]] = MoE
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    norm_name: ClassVar[str] = "model.norm"
    built: ClassVar[tuple[str, ...]] = ()
    has_windows: ClassVar[bool] = True

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` of the family.

        Raises:
          ConfigError: a required key is missing, or a value is not supported.
        """
        config = joined(cls.defaults, config)
        key, built = cls.activation
        if config.get(key, built) != built:
            raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if config.get(key) and key not in cls.built:
                raise ConfigError(f"{key} {config[key]!r} is not supported; supported: none")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for key in sizes:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise ConfigError(f"config.json: {key} must be a positive integer, got {config.get(key)!r}")
        heads = config["num_attention_heads"]
        has_switch, is_on = "use_sliding_window" in cls.defaults, config.get("use_sliding_window", True)
        window = config.get("sliding_window") if cls.has_windows and (is_on or not has_switch) else None
        layer_types = tuple(config.get("layer_types") or ())
        if "sliding_attention" in layer_types and not cls.has_windows:
            raise ConfigError("layer_types: 'sliding_attention' is not supported for this family")
        if window is not None and not layer_types:
            layer_types = tuple(
                "sliding_attention" if cls.is_windowed(config, layer) else "full_attention"
                for layer in range(config["num_hidden_layers"])
            )
        if "sliding_attention" in layer_types and not (is_on or has_switch):
            # Classes of transformers without the key ignore it, and vLLM does not.
            raise ConfigError("use_sliding_window False is not supported for this family")
        fields: dict[str, Any] = {
            "family": config["model_type"],
            **{key: config[key] for key in sizes},
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": config["max_position_embeddings"],
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "attention_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "layer_types": layer_types,
            "sliding_window": window,
            "num_nextn_predict_layers": config.get("num_nextn_predict_layers") or 0,
            **own_values(cls.config_type, ModelConfig, config),
            **cls.own_fields(config),
        }
        if fields["head_dim"] < 1:
            raise ConfigError(f"config.json: hidden_size {config['hidden_size']} is less than {heads} heads")
        if "rope" not in fields:
            fields["rope"] = RopeConfig.from_hf(config)
        # Model cards ask for YaRN to be added to a config that keeps the length of training.
        fields["max_position_embeddings"] = max(fields["max_position_embeddings"], fields["rope"].yarn_length)
        return cls.config_type(**fields)

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        """Whether a layer uses the sliding window, for a config with a window and without `layer_types`."""
        return False

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `config_type` that the family reads in its own way.

        Args:
          config: the `config.json`, with `defaults` for the keys that it leaves out.
        """
        return {}

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.config = config
        self.kinds = self.attention_kinds(config)
        self.ropes = self.layer_ropes(config)
        tied, sizes = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        self.embedding: Any = (TiedEmbedding if tied else Embedding)(*sizes, "model.embed_tokens", **args)
        self.layers = nnx.List([self.make_layer(config, i, **args) for i in range(len(self.kinds))])
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, self.norm_name, **args)
        self.head = (
            None
            if tied
            else Linear(config.hidden_size, config.vocab_size, "lm_head", axes=("embed", "vocab"), **args)
        )

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[Any, ...]:
        """The kind of attention of every layer, from `layer_types`: full or sliding-window.

        A family's may be kinds from outside, beside those of `AttentionKind`."""
        return tuple(
            SlidingWindow(config.sliding_window or 0) if kind == "sliding_attention" else FullAttention()
            for kind in config.layer_types
        )

    @classmethod
    def layer_ropes(cls, config: ModelConfig) -> tuple[RopeConfig | None, ...]:
        """The rotary embedding of every layer; None for a layer whose queries and keys are not rotated."""
        local = config.local_rope or config.rope
        return tuple(local if kind == "sliding_attention" else config.rope for kind in config.layer_types)

    @classmethod
    def head_dims(cls, config: ModelConfig) -> tuple[int, ...]:
        """The size of every layer's heads."""
        return (config.head_dim,) * config.num_hidden_layers

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        """The layer that a checkpoint calls `model.layers.{index}`."""
        sparse = config.moe is not None and index not in config.moe.dense_layers
        mlp = cls.moe_type if sparse else MLP
        return DecoderLayer(config, f"model.layers.{index}", attention=cls.attention_type, mlp=mlp, **args)

    @classmethod
    def make_mtp_layer(cls, config: ModelConfig, **args: Any) -> nnx.Module:
        """The layer of a family with an MTP layer (`mtp_names`); by default the one after the last."""
        return cls.make_layer(config, config.num_hidden_layers, **args)

    @classmethod
    def mtp_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        """The kind of attention of that layer, or of each of its parts."""
        return (FullAttention(),)

    @classmethod
    def mtp_rope(cls, config: ModelConfig) -> RopeConfig | None:
        """The rotary embedding of that layer; None for one whose queries and keys are not rotated."""
        return config.local_rope or config.rope

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        """The shape of a layer's cache."""
        return CacheShape(config.num_cached_heads, config.head_dim)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The first layer's input [N, M] for `tokens` i32[N]. Draft heads share `embedding` instead."""
        return scaled(self.embedding(tokens), self.config.embedding_scale)

    @classmethod
    def ignored(cls, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of the names of tensors that a checkpoint may have and the network does not."""
        return ()

    def layer_inputs(self, tokens: jax.Array, x: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        """Further arguments [N, ...] of every layer, from `tokens` i32[N] and their embedding x [N, M]."""
        return ((),) * len(self.layers)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """The shape of every layer's cache."""
        return tuple(self.layer_cache(self.config, kind) for kind in self.kinds)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        memory: AnyMemory,
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...], AnyMemory]:
        """One forward pass over N rows.

        Args:
          tokens, positions: i32[N].
          memory: the memory of this pass, built for the layers' `kinds`.
          capture: hidden states to return. A number i below the number of layers stands for the residual
            stream before layer i. The number of layers stands for the stream after the last layer, before the
            final norm; it has only N' rows. `LAST_STREAMS` is that, too. Of several streams, the others are
            the mean.

        Returns:
          The hidden states after the final norm [N', M] of the rows whose output is needed (see `Memory`),
          the captured ones [N, M] each, and the memory.
        """
        x = self.embed(tokens)
        ropes = tuple(zip(self.ropes, self.head_dims(self.config), strict=True))
        tables = {each: rope_tables(*each, positions) for each in dict.fromkeys(ropes)}
        inputs = self.layer_inputs(tokens, x)
        streams: list[Any] = [x]
        for i, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
            x = x if getattr(layer, "takes_pending", False) else total(x)
            x, memory = layer(x, memory, i, tables[rope], *inputs[i])
            streams.append(x)
        return self.finish(x), tuple(self.captured(streams, i) for i in capture), memory

    def finish(self, x: jax.Array | PendingSum) -> jax.Array:
        """The hidden states after the final norm, [N', M], from the last layer's output."""
        return self.norm(x)

    def captured(self, streams: Sequence[Any], i: int) -> jax.Array:
        """Entry i of `capture`, from the input of every layer and the output of the last."""
        return total(streams[i])

    @property
    def output_kernel(self) -> jax.Array:
        """The output projection, [M, V]; on shards, this device's part of V."""
        return (self.embedding if self.head is None else self.head).kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V] from normed hidden states [..., M]; on shards, this device's part of V."""
        return product(hidden, self.output_kernel, out_dtype=jnp.float32)
