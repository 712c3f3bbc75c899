"""Attention over a window and compressed entries, as in DeepSeek-V4.

One vector per position, partly rotated, is key and value of all heads. As values are rotated too, the output
is rotated back, by the row's own position.

Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.rms_norm import mean_of_squares

from jaxspec.attention import (
    AnyMemory,
    CacheShape,
    Choice,
    CompressedAttention,
    Entries,
    LayerCacheShape,
    RopeTables,
    apply_rope,
    halves_to_pairs,
    pairs_to_halves,
)
from jaxspec.config import ModelConfig
from jaxspec.config.compressed import HEAVY, SPARSE, CompressedConfig
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import Linear, RMSNorm
from jaxspec.sharding import PendingSum, later_psum, local_part, split_over
from jaxspec.weights.parameters import Fused, HeadRows, Projection, Whole, parameter, product

_FLOAT32 = jnp.dtype(jnp.float32)
_NOT_THERE = -1e30


class Float32Norm(RMSNorm):
    """Root-mean-square norm whose factors are float32, and whose result is rounded once."""

    def __init__(self, width: int, eps: float, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(width, eps, name, dtype=_FLOAT32, rngs=rngs)

    def __call__(self, x: jax.Array | PendingSum) -> jax.Array:
        assert isinstance(x, jax.Array)
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


def compressed_kind(config: CompressedConfig, window: int, layer: int) -> CompressedAttention:
    """The kind of attention of a layer; those past the last have the window alone."""
    match config.layers[layer] if layer < len(config.layers) else None:
        case name if name == SPARSE:
            return CompressedAttention(window, config.sparse_ratio, overlaps=True)
        case name if name == HEAVY:
            return CompressedAttention(window, config.heavy_ratio)
    return CompressedAttention(window)


def compressed_cache_shape(config: CompressedConfig, kind: CompressedAttention) -> LayerCacheShape:
    """The cache of a layer: a vector per position; with entries also their states, the entries and, if an
    indexer chooses among them, their keys."""
    window = CacheShape(1, config.head_dim, planes=1)
    if kind.ratio == 1:
        return window
    widths = (config.head_dim, config.index_head_dim) if kind.overlaps else (config.head_dim,)
    states = CacheShape(1, sum(2 * _state_width(kind, width) for width in widths), planes=1)
    made = (CacheShape(1, width, planes=1, positions_per_entry=kind.ratio) for width in widths)
    return (window, states, *made)


def _state_width(kind: CompressedAttention, width: int) -> int:
    """The width of a row's contents for entries of this width; with an overlap a row has two, one for the
    next entry and one for its own."""
    return width * (2 if kind.overlaps else 1)


class Compressor(nnx.Module):
    """Makes one entry of several positions: the sum of their contents, weighted by a softmax of their gates.

    The softmax runs over positions, separately for each channel. The states of a row are its contents and its
    gates.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: CompressedAttention,
        width: int,
        name: str,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.rope, self.rotated, self.kind, self.width = config.rope, config.head_dim, kind, width
        self.state_width = _state_width(kind, width)
        shape = (kind.ratio, self.state_width)
        self.position_bias = parameter(
            rngs,
            shape,
            (None, None),
            Whole(f"{name}.position_bias", shape),
            dtype=_FLOAT32,
            init="zeros",
        )
        self.norm = Float32Norm(width, config.rms_norm_eps, f"{name}.kv_norm", dtype=dtype, rngs=rngs)

    @staticmethod
    def projections(name: str, in_width: int, state_width: int) -> tuple[Projection, Projection]:
        """The sources of the projections to contents and gates."""
        contents, gates = (
            Projection(f"{name}.{part}_proj.weight", (in_width,), (state_width,), is_sensitive=True)
            for part in ("kv", "gate")
        )
        return contents, gates

    def __call__(self, states: jax.Array, there: jax.Array, starts: jax.Array) -> jax.Array:
        """The entries [F, width] of states [F, R, 2 * state_width]; see `Entries.make`."""
        dtype = states.dtype
        contents, gates = jnp.split(states.astype(jnp.float32), 2, axis=-1)
        bias = self.position_bias[...]
        if self.kind.overlaps:
            contents, gates, bias = (
                self._of_both(contents),
                self._of_both(gates),
                self._of_both(jnp.tile(bias, (2, 1))),
            )
        # What is not there may be NaN.
        contents = jnp.where(there[..., None], contents, 0.0)
        gates = jnp.where(there[..., None], gates + bias, _NOT_THERE)
        pooled = (jax.nn.softmax(gates, axis=1) * contents).sum(axis=1).astype(dtype)
        return rotated(self.norm(pooled), rope_tables(self.rope, self.rotated, starts))

    def _of_both(self, x: jax.Array) -> jax.Array:
        """The earlier positions' part for the next entry and the later ones' part for their own."""
        earlier, later = x[..., : self.kind.ratio, : self.width], x[..., self.kind.ratio :, self.width :]
        return jnp.concatenate([earlier, later], axis=-2)


class CompressedAttentionLayer(nnx.Module):
    """Attention over a window; in layers with entries, over these or over those that an indexer chooses."""

    def __init__(
        self, config: ModelConfig, name: str, *, kind: CompressedAttention, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        sizes = config.compressed
        assert sizes is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps, size = config.hidden_size, config.rms_norm_eps, sizes.head_dim
        heads, groups, rank = config.num_attention_heads, sizes.o_groups, sizes.q_lora_rank
        self.sizes, self.kind, self.eps = sizes, kind, eps
        self.scale = size**-0.5
        self.down = parameter(
            rngs,
            (width, rank + size),
            ("embed", None),
            Fused(
                (
                    Projection(f"{name}.q_a_proj.weight", (width,), (rank,), is_sensitive=True),
                    Projection(f"{name}.kv_proj.weight", (width,), (size,), is_sensitive=True),
                )
            ),
            dtype=dtype,
            fan_in=width,
        )
        self.query_norm = Float32Norm(rank, eps, f"{name}.q_a_norm", **args)
        self.row_norm = Float32Norm(size, eps, f"{name}.kv_norm", **args)
        # Heads are split over devices by the groups of the output projection.
        per_group = heads // groups
        self.query_up = parameter(
            rngs,
            (rank, groups, per_group, size),
            (None, "kv_heads", "group", "head_dim"),
            Projection(f"{name}.q_b_proj.weight", (rank,), (groups, per_group, size), is_sensitive=True),
            dtype=dtype,
            fan_in=rank,
        )
        self.sinks = parameter(
            rngs, (heads,), (None,), Whole(f"{name}.sinks", (heads,)), dtype=_FLOAT32, init="zeros"
        )
        self.output_down = parameter(
            rngs,
            (groups, sizes.o_lora_rank, per_group * size),
            ("kv_heads", None, None),
            HeadRows(
                f"{name}.o_a_proj.weight", groups, sizes.o_lora_rank, 0, sizes.o_lora_rank, per_group * size
            ),
            dtype=dtype,
            fan_in=per_group * size,
        )
        self.output_up = parameter(
            rngs,
            (groups, sizes.o_lora_rank, width),
            ("kv_heads", None, "embed"),
            Projection(f"{name}.o_b_proj.weight", (groups, sizes.o_lora_rank), (width,)),
            dtype=dtype,
            fan_in=groups * sizes.o_lora_rank,
        )
        self.compressor = EntryMaker(config, kind, f"{name}.compressor", **args) if kind.ratio > 1 else None

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        latent, row = jnp.split(product(x, self.down[...]), (self.sizes.q_lora_rank,), axis=-1)
        latent = self.query_norm(latent)
        queries = product(latent, self.query_up[...])
        groups = queries.shape[1]
        queries = queries.reshape(len(queries), -1, self.sizes.head_dim)
        wide = queries.astype(jnp.float32)
        queries = (wide * lax.rsqrt(mean_of_squares(wide) + self.eps)).astype(queries.dtype)
        attended, memory = memory.attend_compressed(
            layer,
            rotated(queries, rope),
            rotated(self.row_norm(row), rope),
            None if self.compressor is None else self.compressor(x, latent, rope),
            scale=self.scale,
            sinks=local_part(self.sinks[...], queries.shape[1]),
        )
        cos, sin = (memory.outputs(layer, table) for table in rope)
        values = rotated_back(attended, (cos, sin)).reshape(len(attended), groups, -1)
        kernel = self.output_down[...]
        # Without "highest" a GPU would round float32 operands to TF32.
        precision = "highest" if kernel.dtype == jnp.float32 else None
        latents = jnp.einsum(
            "ngi,goi->ngo", values, kernel, precision=precision, preferred_element_type=values.dtype
        )
        y = product(latents, self.output_up[...], contracting=2)
        return later_psum(y, split_over(groups, self.sizes.o_groups)), memory


class EntryMaker(nnx.Module):
    """Makes the entries of a layer, and their keys and the queries of an indexer if there is one."""

    def __init__(
        self, config: ModelConfig, kind: CompressedAttention, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        sizes = config.compressed
        assert sizes is not None
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, self.keep = config.hidden_size, sizes.index_topk
        self.heads, self.index_dim = sizes.index_n_heads, sizes.index_head_dim
        self.entries = Compressor(config, kind, sizes.head_dim, name, **args)
        has_indexer = kind.overlaps
        indexer = f"{name}.indexer"
        self.keys = Compressor(config, kind, self.index_dim, indexer, **args) if has_indexer else None
        sources: tuple[Projection, ...] = Compressor.projections(name, width, self.entries.state_width)
        if self.keys is not None:
            sources += Compressor.projections(indexer, width, self.keys.state_width)
        self.states = parameter(
            rngs,
            (width, sum(source.out_shape[0] for source in sources)),
            ("embed", None),
            Fused(sources),
            dtype=dtype,
            fan_in=width,
        )
        outputs = (self.heads, self.index_dim)
        self.index_up = (
            parameter(
                rngs,
                (sizes.q_lora_rank, *outputs),
                (None, None, "head_dim"),
                Projection(f"{indexer}.q_b_proj.weight", (sizes.q_lora_rank,), outputs, is_sensitive=True),
                dtype=dtype,
                fan_in=sizes.q_lora_rank,
            )
            if has_indexer
            else None
        )
        self.index_weights = (
            Linear(width, self.heads, f"{indexer}.scorer.weights_proj", axes=("embed", None), **args)
            if has_indexer
            else None
        )

    def __call__(self, x: jax.Array, latent: jax.Array, rope: RopeTables) -> Entries:
        """The entries of rows x [N, M] with query latents [N, rank]."""
        states = product(x, self.states[...])
        if self.keys is None or self.index_up is None or self.index_weights is None:
            return Entries(states, lambda *args: (self.entries(*args),))
        make: tuple[Callable[..., jax.Array], ...] = (self.entries, self.keys)
        first = 2 * self.entries.state_width

        def both(states: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
            parts = (states[..., :first], states[..., first:])
            return tuple(each(part, *args) for each, part in zip(make, parts, strict=True))

        queries = rotated(product(latent, self.index_up[...]), rope)
        # Factors that all scores share do not change which are the largest.
        weights = self.index_weights(x, out_dtype=jnp.float32)
        return Entries(states, both, Choice(queries, weights, self.keep))


def rotated(x: jax.Array, rope: RopeTables) -> jax.Array:
    """Rotates the last entries of x [N, heads..., D], whose pairs are neighbours; they come out as halves."""
    size = 2 * rope[0].shape[-1]
    return jnp.concatenate([x[..., :-size], apply_rope(pairs_to_halves(x[..., -size:]), rope)], axis=-1)


def rotated_back(x: jax.Array, rope: RopeTables) -> jax.Array:
    """The inverse of `rotated`."""
    cos, sin = rope
    size = 2 * cos.shape[-1]
    return jnp.concatenate(
        [x[..., :-size], halves_to_pairs(apply_rope(x[..., -size:], (cos, -sin)))], axis=-1
    )
