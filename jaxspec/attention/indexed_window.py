"""Attention over a window, whose slots are listed one by one, and over compressed entries of the whole past.

Source: DeepSeek-V4 in vLLM 0.26, `v1/attention/backends/mla/sparse_swa.py` and `compressor_utils.py`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxspec_kernels.slot_mapping import place_rows, slot_mapping

from jaxspec.attention.metadata import build, visible_range
from jaxspec.attention.rows import RowBlock


@dataclass(frozen=True)
class IndexedWindow:
    """Every row sees the last `size` positions, its own included, and one entry per `ratio` positions.

    Entry j pools positions j * ratio to (j + 1) * ratio - 1 and is visible from the last of them on. A ratio
    of 1 means that there are no entries, only the window. `ratio` divides P, so a page holds whole entries.
    """

    size: int
    ratio: int = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedWindowMetadata:
    """The cache slots that the rows of one forward pass write, and those that they see.

    An index of -1 would mean the last slot in JAX, so unused indices are slots of page 0. The lengths, not
    the indices, say how many entries are valid.

    Attributes:
      slots: i32[G, Q], page * P + offset to write in arrays with an entry per position; in page 0 for a
        row that is not kept.
      window_slots: i32[G, Q, W], the slots of the visible positions, the oldest first; slots of page 0
        behind them.
      window_lengths: i32[G, Q], how many of `window_slots` are visible; 0 for a row that is not kept.
      entry_slots: i32[G, Q], page * P/r + offset to write in the array with an entry per r positions; in
        page 0 for rows that are not the last of an entry.
      entry_sources: i32[G, Q, r], the `slots` of the positions that a last row's entry pools; 0 for others.
      entry_starts: i32[G, Q], the first of those positions; 0 for others.
      num_entries: i32[G, Q], visible entries, the row's own included; 0 for a row that is not kept.
      page_table: i32[G, T].
    """

    slots: jax.Array
    window_slots: jax.Array
    window_lengths: jax.Array
    entry_slots: jax.Array
    entry_sources: jax.Array
    entry_starts: jax.Array
    num_entries: jax.Array
    page_table: jax.Array


@visible_range.register
def _(kind: IndexedWindow, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(positions - (kind.size - 1), 0), positions


@build.register
def _(kind: IndexedWindow, block: RowBlock) -> IndexedWindowMetadata:
    ratio, positions, table = kind.ratio, block.positions, block.page_table
    slots, first, last = place_rows(
        positions, block.valid, table.pages, page_size=table.page_size, window=kind.size
    )
    kept = last >= 0
    lengths = jnp.where(kept, last + 1 - first, 0)
    index = jnp.arange(kind.size, dtype=jnp.int32)
    window_slots = slot_mapping(
        (first[..., None] + index).reshape(len(positions), -1),
        (index < lengths[..., None]).reshape(len(positions), -1),
        table.pages,
        page_size=table.page_size,
    ).reshape(*positions.shape, -1)
    ends = kept & ((positions + 1) % ratio == 0) & (ratio > 1)
    # A page holds whole entries, so the positions of an entry are adjacent in one page.
    sources = slots[..., None] + jnp.arange(1 - ratio, 1, dtype=jnp.int32)
    return IndexedWindowMetadata(
        slots=slots,
        window_slots=window_slots,
        window_lengths=lengths,
        entry_slots=jnp.where(ends, slots // ratio, 0),
        entry_sources=jnp.where(ends[..., None], sources, 0),
        entry_starts=jnp.where(ends, positions - (ratio - 1), 0),
        num_entries=jnp.where(kept & (ratio > 1), (positions + 1) // ratio, 0),
        page_table=table.pages,
    )
