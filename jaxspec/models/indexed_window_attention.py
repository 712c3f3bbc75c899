"""Attention over a window, whose slots are listed, and over compressed entries of the whole past.

Source: DeepSeek-V4 in vLLM 0.26, `models/deepseek_v4/compressor.py` and `attention.py`. Unlike there, heads
are grouped-query heads instead of a latent, every entry is visible (as there at a ratio of 128), and entries
do not overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    CacheShape,
    IndexedWindow,
    LayerCacheShape,
    Pool,
    RopeTables,
    apply_rope,
)
from jaxspec.config import ModelConfig
from jaxspec.models.layers import Attention, RMSNorm
from jaxspec.models.parameters import Projection, Whole, parameter, product
from jaxspec.models.rope import rope_tables
from jaxspec.sharding import PendingSum, local_part


def cache_shape(config: ModelConfig, kind: IndexedWindow) -> LayerCacheShape:
    """The cache of a layer: keys and values; with entries also contents and gates, and the entries."""
    each = CacheShape(config.num_cached_heads, config.head_dim)
    if kind.ratio == 1:
        return each
    entries = CacheShape(config.num_cached_heads, config.head_dim, positions_per_entry=kind.ratio)
    return (each, each, entries)


class Compressor(nnx.Module):
    """Pools r positions into one entry: the sum of their contents, weighted by a softmax over their gates.

    The softmax runs over the r positions, separately for each channel. Contents and gates are stored in the
    memory, because the positions of an entry come in several forward passes and drafts among them are
    replaced.
    """

    def __init__(self, config: ModelConfig, ratio: int, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, kv_heads, size = config.hidden_size, config.num_cached_heads, config.head_dim
        self.rope, self.head_dim, self.kv_copies = config.rope, size, config.kv_copies

        def projection(leaf: str) -> nnx.Param:
            return parameter(
                rngs,
                (width, kv_heads, size),
                ("embed", "kv_heads", "head_dim"),
                Projection(f"{name}.{leaf}.weight", (width,), (kv_heads, size), copies=config.kv_copies),
                dtype=dtype,
                fan_in=width,
            )

        self.content, self.gate = projection("wkv"), projection("wgate")
        shape = (ratio, config.num_key_value_heads * size)
        self.position_bias = parameter(
            rngs, shape, (None, None), Whole(f"{name}.ape", shape), dtype=dtype, init="zeros"
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, f"{name}.norm", dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> Pool:
        """The contents and gates of rows x [N, M], and how to pool them."""
        return Pool(product(x, self.content[...]), product(x, self.gate[...]), self._entry)

    def _entry(self, contents: jax.Array, gates: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `Pool.entry`."""
        dtype = contents.dtype
        bias = self.position_bias[...].astype(jnp.float32)
        bias = bias.reshape(1, bias.shape[0], -1, self.head_dim).repeat(self.kv_copies, axis=2)
        bias = local_part(bias, contents.shape[2], along=2)
        weights = jax.nn.softmax(gates.astype(jnp.float32) + bias, axis=1)
        pooled = self.norm((weights * contents.astype(jnp.float32)).sum(axis=1).astype(dtype))
        # One vector is key and value; the key is rotated to the first of its positions.
        return apply_rope(pooled, rope_tables(self.rope, self.head_dim, starts)), pooled


class IndexedWindowAttention(nnx.Module):
    """Grouped-query attention over a window of listed slots and, for a ratio above 1, compressed entries."""

    def __init__(self, config: ModelConfig, name: str, *, ratio: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.heads = Attention(config, name, **args)
        self.compressor = Compressor(config, ratio, f"{name}.compressor", **args) if ratio > 1 else None

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        pool = None if self.compressor is None else self.compressor(x)
        attended, memory = memory.attend_indexed(
            layer, self.heads.project(x), rope, pool, scale=self.heads.scale
        )
        return self.heads.combine(attended), memory
