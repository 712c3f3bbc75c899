"""The paged key/value cache: one array per layer, pages outermost, heads before positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LayerCache = jax.Array
"""[pages, 2N, P, D]: keys in heads 0..N-1 of axis 1, values in heads N..2N-1. A head's page is one
contiguous [P, D] tile, the unit that attention reads, so no program re-lays the cache. Page 0 belongs
to nobody: rows that must not be kept write there, and nothing reads it."""

CACHE_AXES = ("pages", "kv_heads", "page", "head_dim")


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
        jnp.zeros((num_pages, 2 * shape.num_kv_heads, page_size, shape.head_dim), dtype) for shape in shapes
    )
