"""Attention over a window of listed slots and compressed entries of all the past.

Source: DeepSeek-V4 in vLLM 0.26, `models/deepseek_v4/compressor.py` and `attention.py`, on grouped-query
heads instead of a latent, with every entry in sight (as there at a ratio of 128) and none overlapping.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.indexed_attention import indexed_attention
from jaxspec_kernels.kv_write import kv_write

from jaxspec.attention import CacheShape, IndexedWindow, IndexedWindowMetadata, LayerCache, LayerCacheShape
from jaxspec.config import ModelConfig
from jaxspec.models.layers import Attention, RMSNorm, RopeTables
from jaxspec.models.parameters import Projection, Whole, parameter, product
from jaxspec.models.rope import apply_rope, rope_tables


def cache_shape(config: ModelConfig, kind: IndexedWindow) -> LayerCacheShape:
    """What such a layer keeps: keys and values; with entries also what they are made of, and the entries."""
    each = CacheShape(config.num_key_value_heads, config.head_dim)
    if kind.ratio == 1:
        return each
    entries = CacheShape(config.num_key_value_heads, config.head_dim, positions_per_entry=kind.ratio)
    return (each, each, entries)


class Compressor(nnx.Module):
    """Pools r positions into one entry: a softmax over their gates, by channel, weighs their contents.

    Contents and gates wait in a cache of their own, since the positions of an entry come in several forward
    passes, and drafts among them are replaced.
    """

    def __init__(self, config: ModelConfig, ratio: int, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, kv_heads, size = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.rope, self.head_dim = config.rope, size

        def projection(leaf: str) -> nnx.Param:
            return parameter(
                rngs,
                (width, kv_heads, size),
                ("embed", "kv_heads", "head_dim"),
                Projection(f"{name}.{leaf}.weight", (width,), (kv_heads, size)),
                dtype=dtype,
                fan_in=width,
            )

        self.content, self.gate = projection("wkv"), projection("wgate")
        shape = (ratio, kv_heads * size)
        self.place = parameter(
            rngs, shape, (None, None), Whole(f"{name}.ape", shape), dtype=dtype, init="zeros"
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, f"{name}.norm", dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, states: jax.Array, entries: jax.Array, metadata: IndexedWindowMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """Takes in rows x [B, Q, M]; writes an entry for each that is the last of r positions.

        Args:
          states: [pages, N, 2, P, D], contents and gates by position.
          entries: [pages, N, 2, P/r, D], keys and values.

        Returns:
          Both, rewritten. All rows are written before any is read, so an entry may be made of rows of this
          forward pass.
        """
        content, gate = product(x, self.content[...]), product(x, self.gate[...])
        states = kv_write(states, metadata.slots, content, gate)
        page, offset = jnp.divmod(metadata.entry_sources, states.shape[3])
        read = states[page, :, :, offset].astype(jnp.float32)  # [B, Q, r, N, 2, D]
        place = self.place[...].astype(jnp.float32).reshape(-1, *content.shape[-2:])[None, None]
        weights = jax.nn.softmax(read[..., 1, :] + place, axis=2)
        pooled = self.norm((weights * read[..., 0, :]).sum(axis=2).astype(x.dtype))
        # One vector is key and value; the key stands at the first of its positions.
        keys = apply_rope(pooled, rope_tables(self.rope, self.head_dim, metadata.entry_starts))
        return states, kv_write(entries, metadata.entry_slots, keys, pooled)


class IndexedWindowAttention(nnx.Module):
    """Grouped-query attention whose rows list the slots that they see, plus entries of a compressor."""

    def __init__(
        self, config: ModelConfig, kind: IndexedWindow, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.heads = Attention(config, kind, name, **args)
        self.compressor = (
            Compressor(config, kind.ratio, f"{name}.compressor", **args) if kind.ratio > 1 else None
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, metadata: IndexedWindowMetadata, rope: RopeTables
    ) -> tuple[jax.Array, LayerCache]:
        """Attended rows [B, Q, M] of x [B, Q, M], and the cache, of the form that `cache_shape` says."""
        window, *compressed = cache if isinstance(cache, tuple) else (cache,)
        queries, keys, values = self.heads.project(x, rope)
        # The cache is written before it is read: the other order costs a copy of all of it.
        window = kv_write(window, metadata.slots, keys, values)
        if self.compressor is not None:
            states, entries = compressed
            compressed = list(self.compressor(x, states, entries, metadata))
        attended = indexed_attention(
            queries.reshape(*queries.shape[:2], -1, queries.shape[-1]),
            window,
            metadata.window_slots,
            metadata.window_lengths,
            compressed[-1] if compressed else None,
            metadata.page_table,
            metadata.num_entries,
            scale=self.heads.scale,
        )
        attended = self.heads.combine(attended.reshape(queries.shape))
        return attended, (window, *compressed) if compressed else window
