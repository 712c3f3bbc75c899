"""The paged key/value cache: one array per layer, pages outermost, heads before positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.sharding import sharding

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
    shapes: Iterable[CacheShape], *, num_pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh
) -> tuple[LayerCache, ...]:
    """Zero-filled caches, one per layer, split over `mesh` by key/value heads."""

    def layer(shape: CacheShape) -> LayerCache:
        size = (num_pages, shape.num_kv_heads, 2, page_size, shape.head_dim)
        return jnp.zeros(size, dtype, device=sharding(mesh, CACHE_AXES, size))

    return tuple(layer(shape) for shape in shapes)
