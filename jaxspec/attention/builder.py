"""The one door to attention metadata.

`build_metadata` is a pure function of the kinds of attention, the positions and the page table, and it is
called inside the traced programs: in prefill, in verify and in every iteration of the draft loop. Nothing
position-dependent outlives the forward pass it was built for, so nothing can be stale.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jaxspec_kernels.slot_mapping import slot_mapping

from jaxspec.attention.full import FullAttention
from jaxspec.attention.indexed_window import IndexedWindow
from jaxspec.attention.metadata import PlacedRows, build
from jaxspec.attention.sliding_window import SlidingWindow

AttentionKind = FullAttention | SlidingWindow | IndexedWindow


def build_metadata(
    kinds: Iterable[AttentionKind],
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    *,
    page_size: int,
) -> dict[AttentionKind, Any]:
    """Builds the metadata of every kind of attention that a network uses, each by its own builder.

    Args:
      kinds: the kinds, repeated or not.
      positions: i32[B, Q], the position of each row in its sequence.
      valid: bool[B, Q]; a row that is not valid writes to page 0 and sees nothing, and so does one whose
        position has no page: it would see page 0, where anything may lie.
      page_table: i32[B, T], 0 where the slot owns no page.
      page_size: positions per page.

    Raises:
      TypeError: a kind has no builder.
    """
    slots = slot_mapping(positions, valid, page_table, page_size=page_size)
    # Page 0 is nobody's, so a row whose slot lies there is not kept.
    rows = PlacedRows(positions, slots, slots >= page_size, page_table, page_size)
    return {kind: build(kind, rows) for kind in dict.fromkeys(kinds)}
