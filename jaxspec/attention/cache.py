"""The paged key/value cache: pages outermost, heads before positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.sharding import sharding

LayerCache = jax.Array | tuple[jax.Array, ...]
"""[pages, H, 2, P, D] for most layers, in the engine's `cache_dtype`; axis 2 holds keys, then values. A
head's page is two contiguous [P, D] tiles, the unit that attention reads, so no program changes the cache's
layout, and splitting the cache over devices splits heads. A layer with several arrays has a tuple, one per
`CacheShape`. Page 0 has no owner: rows that must not be kept write there, and it is never read."""

CACHE_AXES = ("pages", "kv_heads", None, "page", "head_dim")
"""The logical axes of a cache array, from which its sharding follows."""


@dataclass(frozen=True)
class CacheShape:
    """The shape of one array of a layer's cache, [pages, H, planes, P / positions_per_entry, D].

    Attributes:
      num_kv_heads: H.
      head_dim: D.
      planes: 2 for keys and values; 1 if a single vector per position is both, as in latent attention.
      positions_per_entry: how many positions share an entry. A page covers P positions in every array, so
        that one page table serves them all, and holds P / positions_per_entry entries.
    """

    num_kv_heads: int
    head_dim: int
    planes: int = 2
    positions_per_entry: int = 1


LayerCacheShape = CacheShape | tuple[CacheShape, ...]
"""The array or arrays of one layer's cache."""


def init_cache(
    shapes: Iterable[LayerCacheShape],
    *,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    pair_dtype: jnp.dtype | None = None,
    is_split: bool = True,
) -> tuple[LayerCache, ...]:
    """Zero-filled caches, one per layer.

    Args:
      num_pages: pages of each array, page 0 included.
      page_size: P.
      dtype: that of the arrays.
      pair_dtype: dtype of a layer's keys and values if they are its only array; None takes `dtype`.
      is_split: split the arrays over `mesh` by key/value heads; otherwise every device holds all of them.

    Raises:
      ValueError: `page_size` is not a multiple of an array's positions per entry.
    """

    def array(shape: CacheShape, dtype: jnp.dtype) -> jax.Array:
        if page_size % shape.positions_per_entry:
            raise ValueError(
                f"page_size {page_size} is not a multiple of the {shape.positions_per_entry} positions "
                "that share an entry of the model's cache"
            )
        entries = page_size // shape.positions_per_entry
        size = (num_pages, shape.num_kv_heads, shape.planes, entries, shape.head_dim)
        return jnp.zeros(size, dtype, device=sharding(mesh, CACHE_AXES if is_split else None, size))

    def layer(shape: LayerCacheShape) -> LayerCache:
        if isinstance(shape, tuple):
            return tuple(array(part, dtype) for part in shape)
        return array(shape, pair_dtype if pair_dtype and shape.planes == 2 else dtype)

    return tuple(layer(shape) for shape in shapes)
