"""LFM2: short gated convolutions in most layers, attention in the others.

Source: the `Lfm2ForCausalLM` of transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.linear_recurrence.causal_conv import causal_conv, last_inputs

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    FullAttention,
    LayerCacheShape,
    Recurrence,
    Recurrent,
    RopeTables,
    States,
    StateShape,
)
from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.files import CheckpointError, TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.recurrent_gguf import with_middle_axis
from jaxspec.models.layers.transformer import MLP, Attention, DecoderLayer
from jaxspec.sharding import PendingSum, later_psum, local_part, split_over
from jaxspec.weights.parameters import Projection, Whole, bias_parameter, parameter, product

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor


@dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """Adds keys of this family.

    Attributes:
      conv_L_cache: rows that a convolution sees, its own included.
      conv_bias: the convolutions and the projections around them have biases.
    """

    conv_L_cache: int = 3
    conv_bias: bool = False
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "conv")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_L_cache < 2:
            raise ConfigError(f"conv_L_cache {self.conv_L_cache} is not supported; supported: 2 and more")

    @property
    def conv_heads(self) -> int:
        """The groups of channels that a convolution is split by over devices."""
        return math.gcd(self.hidden_size, self.num_attention_heads)

    @property
    def conv_state(self) -> StateShape:
        """The last inputs of a convolution."""
        channels = self.hidden_size // self.conv_heads
        return StateShape(self.conv_heads, (((self.conv_L_cache - 1, channels), None),), channels)


class ShortConv(nnx.Module):
    """out(c * conv(b * v)), in the place of attention, where b, c and v are projections of a row."""

    def __init__(self, config: Lfm2Config, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, heads = config.hidden_size, config.conv_heads
        self.shape, self.heads = config.conv_state, heads
        parts, has_bias = (3, heads, width // heads), config.conv_bias
        self.inputs = parameter(
            rngs,
            (width, *parts),
            ("embed", None, "kv_heads", None),
            Projection(f"{name}.in_proj.weight", (width,), parts),
            dtype=dtype,
            fan_in=width,
        )
        source = Projection(f"{name}.in_proj.bias", (), parts)
        self.inputs_bias = bias_parameter(
            has_bias, rngs, parts, (None, "kv_heads", None), source, dtype=dtype
        )
        filters = (width, 1, config.conv_L_cache)
        self.conv = parameter(
            rngs,
            filters,
            (None, None, None),
            Whole(f"{name}.conv.weight", filters),
            dtype=dtype,
            fan_in=config.conv_L_cache,
        )
        self.conv_bias = _bias(has_bias, f"{name}.conv", width, **args)
        self.output = parameter(
            rngs,
            (heads, width // heads, width),
            ("kv_heads", None, "embed"),
            Projection(f"{name}.out_proj.weight", (heads, width // heads), (width,)),
            dtype=dtype,
            fan_in=width,
        )
        self.output_bias = _bias(has_bias, f"{name}.out_proj", width, **args)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        projected = product(x, self.inputs[...])
        if self.inputs_bias is not None:
            projected = projected + self.inputs_bias[...]
        before, after, values = (projected[:, i] for i in range(3))  # [N, H, channels] each
        filters = self.conv[...].reshape(self.heads, -1, self.conv.shape[-1]).swapaxes(1, 2)
        bias = None if self.conv_bias is None else self.conv_bias[...].reshape(self.heads, -1)
        heads = values.shape[1]
        rule = ConvRule(local_part(filters, heads), None if bias is None else local_part(bias, heads))
        recurrence = Recurrence(self.shape, before * values, rule.step, rule.chunk)
        read, memory = memory.recur(layer, recurrence)
        gated = memory.outputs(layer, after) * read.astype(x.dtype)
        y = later_psum(product(gated, self.output[...], contracting=2), split_over(heads, self.heads))
        return y if self.output_bias is None else y + self.output_bias[...], memory


def _bias(present: bool, name: str, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Param | None:
    return bias_parameter(present, rngs, (width,), (None,), Whole(f"{name}.bias", (width,)), dtype=dtype)


@dataclass(frozen=True)
class ConvRule:
    """A convolution over the rows of a text; its methods are those of a `Recurrence`.

    Attributes:
      filters: [H, W, channels].
      bias: [H, channels], or None.
    """

    filters: jax.Array
    bias: jax.Array | None

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.step`: outputs [n, H, channels]."""
        (inputs,) = states
        text = jnp.concatenate([inputs, rows.astype(inputs.dtype)[:, :, None]], axis=2)
        return causal_conv(text, self.filters, self.bias)[:, :, 0], (text[:, :, 1:],)

    def chunk(self, states: States, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.chunk`: outputs [n, C, H, channels]."""
        (inputs,) = states
        rows = jnp.where(valid[:, :, None, None], rows, 0).astype(inputs.dtype)
        text = jnp.concatenate([inputs, jnp.swapaxes(rows, 1, 2)], axis=2)
        outputs = causal_conv(text, self.filters, self.bias)
        return jnp.swapaxes(outputs, 1, 2), (last_inputs(text, valid.sum(axis=1), inputs.shape[2]),)


class Lfm2Attention(Attention):
    """Attention under this family's names."""

    norm_names = ("q_layernorm", "k_layernorm")
    output_name = "out_proj"


class Lfm2MLP(MLP):
    """The feed-forward network under this family's names."""

    projections = ("w1", "w3", "w2")


class Lfm2Layer(DecoderLayer):
    """A pre-norm layer of attention or of a convolution."""

    norm_names = ("operator_norm", "ffn_norm")
    mlp_name = "feed_forward"


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    """Layers without key/value heads are convolutions."""
    heads = meta.list("attention.head_count_kv", int, [])
    if len(set(heads) - {0}) != 1:
        key = f"{meta.prefix}attention.head_count_kv"
        raise CheckpointError(f"{meta.file}: metadata {key} must list one number of heads and 0, got {heads}")
    if window := meta.positive("attention.sliding_window", None):
        key = f"{meta.prefix}attention.sliding_window"
        raise CheckpointError(f"{meta.file}: metadata {key} {window} is not supported")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": meta.decimal("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """The converter dropped the middle axis of filters [M, 1, W]."""
    return {
        name: with_middle_axis(tensor) if name.endswith(".conv.conv.weight") else tensor
        for name, tensor in tensors.items()
    }


class Lfm2(Decoder):
    """A target network."""

    config_type = Lfm2Config
    norm_name = "model.embedding_norm"
    gguf = GGUFArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        (
            *Lfm2Layer.norm_names,
            *(f"self_attn.{leaf}" for leaf in (*Lfm2Attention.norm_names, Lfm2Attention.output_name)),
            *(f"feed_forward.{leaf}" for leaf in Lfm2MLP.projections),
            *("conv.in_proj", "conv.conv", "conv.out_proj"),
        ),
        config=_gguf_config,
        tensors=_gguf_tensors,
    )
    defaults: ClassVar = {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(config["num_hidden_layers"])
        attending = config.get("full_attn_idxs", layers)
        kinds = config.get("layer_types") or ["full_attention" if i in attending else "conv" for i in layers]
        return {
            "layer_types": tuple(kinds),
            "intermediate_size": _inner_width(config),
            "rms_norm_eps": config["norm_eps"],
            "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
            "rope": RopeConfig.from_hf(config, default_theta=1e6),
            "qk_norm": True,
            "attention_bias": False,
            "mlp_bias": False,
        }

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        return tuple(Recurrent() if kind == "conv" else FullAttention() for kind in config.layer_types)

    @classmethod
    def layer_cache(cls, config: Any, kind: AttentionKind) -> LayerCacheShape:
        return config.conv_state if isinstance(kind, Recurrent) else super().layer_cache(config, kind)

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        is_conv = config.layer_types[index] == "conv"
        attention, name = (ShortConv, "conv") if is_conv else (Lfm2Attention, "self_attn")
        args = {"attention": attention, "attention_name": name, "mlp": Lfm2MLP, **args}
        return Lfm2Layer(config, f"model.layers.{index}", **args)


def _inner_width(config: Mapping[str, Any]) -> int:
    """The width of the feed-forward networks, which published files give before it is adjusted."""
    width = config.get("block_ff_dim", config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return width
    unit, width = config["block_multiple_of"], int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
    return -(-max(width, 1) // unit) * unit
