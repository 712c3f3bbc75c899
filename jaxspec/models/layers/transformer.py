"""Layers that the model families and the drafters share."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxspec_kernels.fp8_matmul import gated_fp8_matmul
from jaxspec_kernels.matmul import PackedRows, PackedWeight
from jaxspec_kernels.packed_matmul import CodedWeight
from jaxspec_kernels.packed_matmul.coded_product import gated_coded_product, is_gated_in_fp8
from jaxspec_kernels.rms_norm import rms_norm

from jaxspec.attention import AnyMemory, PagedMemory, RopeTables, pairs_to_halves, within_to_halves
from jaxspec.config import ModelConfig
from jaxspec.sharding import (
    PendingSum,
    later_add,
    later_psum,
    local_part,
    local_start,
    psum,
    split_over,
    total,
)
from jaxspec.weights.parameters import (
    Fused,
    Joined,
    Projection,
    Rows,
    Source,
    Whole,
    bias_parameter,
    parameter,
    product,
)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = parameter(
            rngs, (width,), (None,), Whole(f"{name}.weight", (width,)), dtype=dtype, init="ones"
        )

    def factors(self) -> jax.Array:
        """f32[width], the factors of normed rows."""
        return self.scale[...].astype(jnp.float32)

    def __call__(self, x: jax.Array | PendingSum) -> jax.Array:
        if isinstance(x, PendingSum):
            normed = x.normed(self.scale[...], self.eps)
            if normed is not None:
                return normed
        return rms_norm(total(x), self.scale[...], self.eps)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """x times a factor that is rounded to its dtype, as in training."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


class Linear(nnx.Module):
    """x @ kernel, and an optional bias: maps [..., in] to [..., out].

    If the kernel is split over devices by its outputs, the result is this device's part of them. If it is
    split by its inputs, x is this device's part, and the result is a sum over all devices, which is pending.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        name: str,
        *,
        axes: tuple[str | None, str | None],
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.in_width = in_width
        self.kernel = parameter(
            rngs,
            (in_width, out_width),
            axes,
            Projection(f"{name}.weight", (in_width,), (out_width,)),
            dtype=dtype,
            fan_in=in_width,
        )
        self.bias = bias_parameter(
            bias, rngs, (out_width,), axes[1:], Whole(f"{name}.bias", (out_width,)), dtype=dtype
        )

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None) -> Any:
        return self.add_up(product(x, self.kernel[...], out_dtype=out_dtype), x.shape[-1])

    def add_up(self, part: jax.Array, width: int) -> Any:
        """The result, from the product of this device's `width` inputs."""
        y = later_psum(part, split_over(width, self.in_width))
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embedding, [V, M], whole on every device, because a step reads only a few of its rows."""

    def __init__(self, vocab_size: int, width: int, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.table = parameter(
            rngs,
            (vocab_size, width),
            (None, "embed"),
            Rows(f"{name}.weight", (vocab_size, width)),
            dtype=dtype,
            fan_in=width,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., M] of `tokens` i32[...]; ids outside the vocabulary are clamped."""
        table: Any = self.table[...]
        if isinstance(table, PackedRows):
            return table.rows(tokens)
        return jnp.take(table, tokens, axis=0, mode="clip")


class TiedEmbedding(nnx.Module):
    """Token embedding and output projection in one array, stored as the projection, [M, V].

    On a CPU, a product with a [V, M] table would transpose it in every step. Reading embeddings as columns
    costs little.
    """

    def __init__(self, vocab_size: int, width: int, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.vocab_size = vocab_size
        self.kernel = parameter(
            rngs,
            (width, vocab_size),
            ("embed", "vocab"),
            Projection(f"{name}.weight", (width,), (vocab_size,)),
            dtype=dtype,
            fan_in=width,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., M] of `tokens` i32[...]; ids outside the vocabulary are clamped."""
        kernel: Any = self.kernel[...]
        if isinstance(kernel, PackedWeight):
            return kernel.columns(tokens)
        part = kernel.shape[1]
        if part == self.vocab_size:
            return jnp.moveaxis(jnp.take(kernel, tokens, axis=1, mode="clip"), 0, -1)
        column = jnp.clip(tokens, 0, self.vocab_size - 1) - local_start(part)
        mine = (column >= 0) & (column < part)
        rows = jnp.moveaxis(jnp.take(kernel, column, axis=1, mode="clip"), 0, -1)
        return psum(jnp.where(mine[..., None], rows, 0), split_over(part, self.vocab_size))


class Attention(nnx.Module):
    """Grouped-query attention, with one product for queries, keys and values.

    Attributes:
      norm_type: the class of the norms of queries and keys, for a config with `qk_norm`.
      norm_names: the names of those two.
      query_rows: vectors of size D that `q_proj` has for each query head.
      projections: the names of what is projected, in the order of the rows of a key/value head.
      output_name: the name of the output projection.
      is_joined: whether a checkpoint has the three projections in one tensor, `qkv_proj`.
      rotates_neighbours: whether rope rotates neighbouring entries as pairs, instead of entries of the two
        halves of what it rotates.
    """

    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    norm_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    query_rows: ClassVar[int] = 1
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    output_name: ClassVar[str] = "o_proj"
    is_joined: ClassVar[bool] = False
    rotates_neighbours: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        *,
        in_width: int | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads, size = config.num_attention_heads, config.num_cached_heads, config.head_dim
        width, group = config.hidden_size, heads // kv_heads
        in_width = in_width or width
        copies, queries = config.kv_copies, group * self.query_rows
        sizes = {"q_proj": (queries, 1), "k_proj": (1, copies), "v_proj": (1, copies)}
        parts = [(part, *sizes[part]) for part in self.projections]
        rows = sum(n for _, n, _ in parts)

        def fused(leaf: str, *in_shape: int) -> Fused:
            projections = (
                Projection(
                    f"{name}.{part}.{leaf}", in_shape, (kv_heads, n, size), copies=times, is_sensitive=True
                )
                for part, n, times in parts
            )
            if self.is_joined:
                return Joined(tuple(projections), -2, f"{name}.qkv_proj.{leaf}")
            return Fused(tuple(projections), -2)

        self.qkv = parameter(
            rngs,
            (in_width, kv_heads, rows, size),
            ("embed", "kv_heads", "group", "head_dim"),
            fused("weight", in_width),
            dtype=dtype,
            fan_in=in_width,
        )
        self.output = parameter(
            rngs,
            (kv_heads, group, size, width),
            ("kv_heads", "group", "head_dim", "embed"),
            Projection(f"{name}.{self.output_name}.weight", (kv_heads, group, size), (width,)),
            dtype=dtype,
            fan_in=heads * size,
        )
        self.qkv_bias = bias_parameter(
            config.attention_bias or config.qkv_bias,
            rngs,
            (kv_heads, rows, size),
            ("kv_heads", "group", "head_dim"),
            fused("bias"),
            dtype=dtype,
        )
        self.output_bias = bias_parameter(
            config.attention_bias,
            rngs,
            (width,),
            ("embed",),
            Whole(f"{name}.{self.output_name}.bias", (width,)),
            dtype=dtype,
        )
        self.kv_heads = kv_heads
        self.scale = config.attention_scale or size**-0.5
        self.sinks = (
            parameter(rngs, (heads,), (None,), Whole(f"{name}.sinks", (heads,)), dtype=dtype)
            if config.attention_sinks
            else None
        )
        self.rotated = config.rope.rotated(size)
        norms: tuple[Any, Any] = (None, None)
        if config.qk_norm:
            norms = self.head_norms(config, name, dtype=dtype, rngs=rngs)
        self.query_norm, self.key_norm = norms

    def head_norms(self, config: ModelConfig, name: str, **args: Any) -> tuple[nnx.Module, nnx.Module]:
        """The norms of queries and keys; here each head is normed by itself."""
        norm = partial(self.norm_type, config.head_dim, config.rms_norm_eps, **args)
        queries, keys = (norm(f"{name}.{leaf}") for leaf in self.norm_names)
        return queries, keys

    def project(self, x: jax.Array) -> jax.Array:
        """Maps x [N, in] to [N, H, G + 2, D]: for each key/value head its queries, its key and its value."""
        fused = self.fused(x)
        if self.query_norm is not None:
            queries, keys, values = fused[..., :-2, :], fused[..., -2:-1, :], fused[..., -1:, :]
            fused = jnp.concatenate([*self.normed(queries, keys), values], axis=-2)
        if not self.rotates_neighbours and self.rotated == fused.shape[-1]:
            return fused
        rotated, values = fused[..., :-1, :], fused[..., -1:, :]
        # Rope rotates entry i together with entry i + D/2.
        in_order = (
            pairs_to_halves(rotated) if self.rotates_neighbours else within_to_halves(rotated, self.rotated)
        )
        return jnp.concatenate([in_order, values], axis=-2)

    def normed(self, queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Norms queries [N, H, G, D] and keys [N, H, 1, D]."""
        return self.query_norm(queries), self.key_norm(keys)

    def fused(self, x: jax.Array) -> jax.Array:
        """The projections of x [N, in] without norms: what `q_proj` gives, keys and values of each head."""
        fused = product(x, self.qkv[...])
        return fused if self.qkv_bias is None else fused + self.qkv_bias[...]

    def combine(self, attended: jax.Array) -> jax.Array | PendingSum:
        """The output projection: maps attended values [N, H, G, D] to [N, M]."""
        part = product(attended, self.output[...], contracting=3)
        y = later_psum(part, split_over(attended.shape[1], self.kv_heads))
        return y if self.output_bias is None else y + self.output_bias[...]

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, in] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        projected = self.project(x)
        heads, group = projected.shape[1], projected.shape[2] - 2
        sinks = None if self.sinks is None else local_part(self.sinks[...], heads * group)
        attended, memory = memory.attend(layer, projected, rope, scale=self.scale, sinks=sinks)
        return self.combine(attended), memory

    def write(self, x: jax.Array, memory: PagedMemory, layer: int, rope: RopeTables) -> PagedMemory:
        """Writes the keys and values of x [N, in] into the memory, without attending."""
        return memory.write(layer, self.project(x), rope)


class MLP(nnx.Module):
    """Gated feed-forward network, down(activation(gate(x)) * up(x)), with one product for gate and up.

    Maps [..., M] to [..., M].

    Attributes:
      projections: the names of gate, up and down.
    """

    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up = parameter(
            rngs,
            (width, 2, inner),
            ("embed", None, "feed_forward"),
            self.gate_up_source(name, "weight", (width,), inner),
            dtype=dtype,
            fan_in=width,
        )
        self.gate_up_bias = bias_parameter(
            config.mlp_bias,
            rngs,
            (2, inner),
            (None, "feed_forward"),
            self.gate_up_source(name, "bias", (), inner),
            dtype=dtype,
        )
        self.down = Linear(
            inner,
            width,
            f"{name}.{self.projections[2]}",
            axes=("feed_forward", "embed"),
            bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )

    @classmethod
    def gate_up_source(cls, name: str, leaf: str, in_shape: tuple[int, ...], inner: int) -> Source:
        """Where a checkpoint keeps gate and up, [in, 2, F], or their biases, [2, F]."""
        names = (f"{name}.{projection}.{leaf}" for projection in cls.projections[:2])
        return Fused(tuple(Projection(each, in_shape, (1, inner)) for each in names), axis=-2)

    def activation(self, x: jax.Array) -> jax.Array:
        """The activation function of the gate."""
        return jax.nn.silu(x)

    def weigh(self, x: jax.Array, inner: jax.Array) -> jax.Array:
        """The input of the down projection: by default `inner`, what gate and up of x give."""
        return inner

    @property
    def _is_plain(self) -> bool:
        """Whether this is down(silu(gate(x)) * up(x))."""
        own = type(self)
        is_own = own.activation is MLP.activation and own.weigh is MLP.weigh
        return is_own and self.gate_up_bias is None

    def __call__(self, x: jax.Array) -> jax.Array | PendingSum:
        gate_up: Any = self.gate_up[...]
        down: Any = self.down.kernel[...]
        if self._is_plain and is_gated_in_fp8(x, gate_up, down):
            return self.down.add_up(gated_fp8_matmul(x, gate_up, down), gate_up.shape[-1])
        if self._is_plain and isinstance(gate_up, CodedWeight):
            return self.down(gated_coded_product(x, gate_up))
        fused = product(x, gate_up)
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...]
        return self.down(self.weigh(x, self.activation(fused[..., 0, :]) * fused[..., 1, :]))


class JoinedMLP(MLP):
    """An `MLP` whose gate and up projections are one tensor in a checkpoint, gate first."""

    @classmethod
    def gate_up_source(cls, name: str, leaf: str, in_shape: tuple[int, ...], inner: int) -> Projection:
        return Projection(f"{name}.gate_up_proj.{leaf}", in_shape, (2, inner))


class DecoderLayer(nnx.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)).

    The arguments `attention` and `mlp` build the two networks from a config and a name, and `norm` builds the
    norms; `attention_name` is that of the attention in a checkpoint's layer.

    Attributes:
      takes_pending: whether x may be a `PendingSum`; layers without this attribute get an array.
      norm_names: the names of the two norms in a checkpoint.
      mlp_name: that of the feed-forward network.
    """

    takes_pending: ClassVar[bool] = True
    norm_names: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    mlp_name: ClassVar[str] = "mlp"

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        *,
        norm: Callable[..., Any] = RMSNorm,
        attention: Callable[..., Any] = Attention,
        attention_name: str = "self_attn",
        mlp: Callable[..., Any] = MLP,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps = config.hidden_size, config.rms_norm_eps
        before, mlp_before = (norm(width, eps, f"{name}.{leaf}", **args) for leaf in self.norm_names)
        self.input_norm = before
        self.attention = attention(config, f"{name}.{attention_name}", **args)
        self.mlp_norm = mlp_before
        self.mlp = mlp(config, f"{name}.{self.mlp_name}", **args)

    def __call__(
        self, x: jax.Array | PendingSum, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        attended, memory = self.attention(self.input_norm(x), memory, layer, rope)
        x = later_add(memory.outputs(layer, total(x)), attended)
        return later_add(x, self.mlp(self.mlp_norm(x))), memory


class SandwichLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    `attention` and `mlp` build the two networks from a config and a name, and `norm` builds the norms.
    `norms` are their names in a checkpoint, in the order in which they are applied.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        norms: tuple[str, str, str, str],
        *,
        norm: Callable[..., Any] = RMSNorm,
        attention: Callable[..., Any] = Attention,
        mlp: Callable[..., Any] = MLP,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        before, after, mlp_before, mlp_after = (
            norm(config.hidden_size, config.rms_norm_eps, f"{name}.{leaf}", **args) for leaf in norms
        )
        self.input_norm, self.attention_norm = before, after
        self.mlp_input_norm, self.mlp_output_norm = mlp_before, mlp_after
        self.attention = attention(config, f"{name}.self_attn", **args)
        self.mlp = mlp(config, f"{name}.mlp", **args)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        attended, memory = self.attention(self.input_norm(x), memory, layer, rope)
        x = memory.outputs(layer, x) + self.attention_norm(attended)
        return x + self.mlp_output_norm(self.mlp(self.mlp_input_norm(x))), memory
