"""Attention over a window, whose slots are listed one by one, and over compressed entries of the whole past.

Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`; vLLM 0.33,
`v1/attention/backends/mla/sparse_swa.py` and `compressor_utils.py`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxspec_kernels.slot_mapping import place_rows, slot_mapping

from jaxspec.attention.metadata import build, visible_range
from jaxspec.attention.rows import PageTable, RowBlock


@dataclass(frozen=True)
class CompressedAttention:
    """Every row sees the last `window` positions, its own included, and one entry per `ratio` positions.

    Entry j ends at position (j + 1) * ratio - 1 and is visible from there on. It is made of the `ratio`
    positions up to its end; with `overlaps`, of twice as many, where there are. A ratio of 1 means that there
    are no entries, only the window. An entry is stored in the page of its end, which has
    ceil(P / ratio) of them.
    """

    window: int
    ratio: int = 1
    overlaps: bool = False

    @property
    def num_sources(self) -> int:
        """The number of positions that an entry is made of."""
        return self.ratio * (2 if self.overlaps else 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompressedMetadata:
    """The slots that the rows of one forward pass write, and those that they may see.

    A group of Q rows ends at most F = ceil(Q / ratio) entries. An index of -1 would mean the last slot in
    JAX, so unused indices are slots of page 0. The lengths, not the indices, say how many slots are valid.
    Without entries, F and N are 0.

    Attributes:
      slots: i32[G, Q], page * P + offset to write in arrays with an element per position; in page 0 for a
        row that is not kept.
      window_slots: i32[G, Q, W], the slots of the visible positions, the oldest first; slots of page 0
        behind them.
      window_lengths: i32[G, Q], how many of `window_slots` are visible; 0 for a row that is not kept.
      written_entries: i32[G, F], the entries that the group's rows end, as page * ceil(P / ratio) + offset;
        in page 0 for those that it does not end.
      entry_sources: i32[G, F, R], the `slots` of the positions that an entry is made of, the oldest first.
      entry_seen: bool[G, F, R], which of them there are.
      entry_starts: i32[G, F], the first position of an entry without its overlap.
      entries: i32[G, N], every entry of the slot, the oldest first.
      num_entries: i32[G, Q], how many of them a row may see, its own included; 0 for a row that is not kept.
    """

    slots: jax.Array
    window_slots: jax.Array
    window_lengths: jax.Array
    written_entries: jax.Array
    entry_sources: jax.Array
    entry_seen: jax.Array
    entry_starts: jax.Array
    entries: jax.Array
    num_entries: jax.Array


@visible_range.register
def _(kind: CompressedAttention, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(positions - (kind.window - 1), 0), positions


@build.register
def _(kind: CompressedAttention, block: RowBlock) -> CompressedMetadata:
    ratio, positions, table = kind.ratio, block.positions, block.page_table
    groups, rows = block.shape
    slots, first, last = place_rows(
        positions, block.valid, table.pages, page_size=table.page_size, window=kind.window
    )
    kept = last >= 0
    lengths = jnp.where(kept, last + 1 - first, 0)
    index = jnp.arange(kind.window, dtype=jnp.int32)
    window_slots = _slots(first[..., None] + index, index < lengths[..., None], table)

    has_entries = ratio > 1
    count = -(-rows // ratio) * has_entries
    start = positions[:, :1]
    ends = start // ratio * ratio + (ratio - 1) + ratio * jnp.arange(count, dtype=jnp.int32)
    row = ends - start
    written = (row < rows) & jnp.take_along_axis(kept, jnp.clip(row, 0, rows - 1), axis=1)
    sources = ends[..., None] + jnp.arange(1 - kind.num_sources, 1, dtype=jnp.int32)
    seen = written[..., None] & (sources >= 0)
    most = table.pages.shape[1] * table.page_size // ratio * has_entries
    every = jnp.arange(most, dtype=jnp.int32) * ratio + (ratio - 1)
    every = jnp.broadcast_to(every, (groups, most))
    return CompressedMetadata(
        slots=slots,
        window_slots=window_slots,
        window_lengths=lengths,
        written_entries=_entry_slots(ends, written, table, ratio),
        entry_sources=_slots(sources, seen, table),
        entry_seen=seen,
        entry_starts=jnp.where(written, ends - (ratio - 1), 0),
        entries=_entry_slots(every, jnp.ones_like(every, bool), table, ratio),
        num_entries=jnp.where(kept, (positions + 1) // ratio, 0) * has_entries,
    )


def _slots(positions: jax.Array, valid: jax.Array, table: PageTable) -> jax.Array:
    """The slots of positions i32[G, ...] of each group."""
    if not positions.size:
        return positions
    flat, is_valid = (x.reshape(len(positions), -1) for x in (positions, valid))
    slots = slot_mapping(flat, is_valid, table.pages, page_size=table.page_size)
    return slots.reshape(positions.shape)


def _entry_slots(ends: jax.Array, valid: jax.Array, table: PageTable, ratio: int) -> jax.Array:
    """The slots of the entries that end at positions i32[G, N]."""
    page, offset = jnp.divmod(_slots(ends, valid, table), table.page_size)
    return page * -(-table.page_size // ratio) + offset // ratio
