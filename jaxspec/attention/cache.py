"""The paged key/value cache: pages outermost, heads before positions."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxspec_kernels.attention_parts.coded_cache import CodedCache

from jaxspec.sharding import sharding

LayerCache = jax.Array | CodedCache | tuple[jax.Array, ...]
"""[pages, H, 2, P, D] for most layers, in the engine's `cache_dtype`; axis 2 holds keys, then values. A
head's page is two contiguous [P, D] tiles, the unit that attention reads, so no program changes the cache's
layout, and splitting the cache over devices splits heads. Keys and values in 8 bits are a `CodedCache`. A
layer with several arrays has a tuple, one per `CacheShape`. Page 0 has no owner: rows that must not be kept
write there, and it is never read.

A recurrent layer has a tuple of the arrays of its states [places, H, ...], and last the inputs of drafts that
may still count, [B, K, H, F] (`StateShape`)."""

CACHE_AXES = ("pages", "kv_heads", None, "page", "head_dim")
"""The logical axes of a cache array, from which its sharding follows."""
_STATE_AXES = ("slots", "kv_heads")


@dataclass(frozen=True)
class CacheShape:
    """The shape of one array of a layer's cache, [pages, H, planes, ceil(P / positions_per_entry), D].

    Attributes:
      num_kv_heads: H.
      head_dim: D.
      planes: 2 for keys and values; 1 if a single vector per position is both, as in latent attention.
      positions_per_entry: how many positions share an entry. A page covers P positions in every array, so
        that one page table serves them all, and holds the entries that end in it.
    """

    num_kv_heads: int
    head_dim: int
    planes: int = 2
    positions_per_entry: int = 1


@dataclass(frozen=True)
class StateShape:
    """The shape of a recurrent layer's states, which it has in place of a cache.

    Attributes:
      num_heads: H.
      states: for each array of a state, its shape for one head, and its dtype; None for that of the caches.
      row: F, the numbers of a row for each head.
    """

    num_heads: int
    states: tuple[tuple[tuple[int, ...], str | None], ...]
    row: int


LayerCacheShape = CacheShape | tuple[CacheShape, ...] | StateShape
"""The array or arrays of one layer's cache; () for a layer without one."""


@dataclass(frozen=True)
class NumStates:
    """How many states a recurrent layer keeps.

    Attributes:
      slots: B, those of the slots, in the first places.
      copies: those behind them, for prompts that begin alike.
      drafts: K, of each slot the drafts whose inputs are kept until it is known whether they count.
    """

    slots: int
    copies: int = 0
    drafts: int = 0


def init_cache(
    shapes: Iterable[LayerCacheShape],
    *,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    pair_dtype: jnp.dtype | None = None,
    is_split: bool = True,
    num_states: NumStates | None = None,
) -> tuple[LayerCache, ...]:
    """Zero-filled caches, one per layer.

    Args:
      num_pages: pages of each array, page 0 included.
      page_size: P.
      dtype: that of the arrays.
      pair_dtype: dtype of a layer's keys and values if they are its only array; None takes `dtype`.
      is_split: split the arrays over `mesh` by key/value heads; otherwise every device holds all of them.
      num_states: how many states recurrent layers keep; None if there are no such layers.
    """

    def zeros(size: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        axes = CACHE_AXES[: len(size)] if is_split else None
        return jnp.zeros(size, dtype, device=sharding(mesh, axes, size))

    def array(shape: CacheShape, dtype: jnp.dtype) -> jax.Array:
        entries = -(-page_size // shape.positions_per_entry)
        return zeros((num_pages, shape.num_kv_heads, shape.planes, entries, shape.head_dim), dtype)

    def pair(shape: CacheShape, dtype: jnp.dtype) -> jax.Array | CodedCache:
        codes = array(shape, dtype)
        if dtype != jnp.float8_e4m3fn:
            return codes
        return CodedCache(codes, zeros(codes.shape[:-1], jnp.dtype(jnp.uint8)))

    def states(shape: StateShape, count: NumStates) -> tuple[jax.Array, ...]:
        heads, places = shape.num_heads, count.slots + count.copies
        sizes = [((places, heads, *each), own or dtype) for each, own in shape.states]
        axes = [(*_STATE_AXES, *(None for _ in each)) for each, _ in shape.states]
        sizes.append(((count.slots, count.drafts, heads, shape.row), dtype))
        axes.append(("slots", None, "kv_heads", None))
        return tuple(
            jnp.zeros(size, own, device=sharding(mesh, along if is_split else None, size))
            for (size, own), along in zip(sizes, axes, strict=True)
        )

    def layer(shape: LayerCacheShape) -> LayerCache:
        if isinstance(shape, StateShape):
            assert num_states is not None, "recurrent layers keep states"
            return states(shape, num_states)
        if isinstance(shape, tuple):
            return tuple(array(part, dtype) for part in shape)
        return pair(shape, pair_dtype) if pair_dtype and shape.planes == 2 else array(shape, dtype)

    return tuple(layer(shape) for shape in shapes)
