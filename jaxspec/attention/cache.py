"""The paged key/value cache: one array per layer, pages outermost, heads before positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LayerCache = jax.Array
"""[pages, N, 2, P, D]; axis 2 holds keys, then values. A head's page is two contiguous [P, D] tiles, the
unit that attention reads, so no program re-lays the cache, and splitting it over devices splits heads.
Page 0 belongs to nobody: rows that must not be kept write there, and nothing reads it."""

CACHE_AXES = ("pages", "kv_heads", None, "page", "head_dim")


@dataclass(frozen=True)
class CacheShape:
    """What one layer keeps per position."""

    num_kv_heads: int
    head_dim: int


def init_cache(
    shapes: Iterable[CacheShape], *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> tuple[LayerCache, ...]:
    """Zero-filled caches, one per layer."""
    return tuple(
        jnp.zeros((num_pages, shape.num_kv_heads, 2, page_size, shape.head_dim), dtype) for shape in shapes
    )
