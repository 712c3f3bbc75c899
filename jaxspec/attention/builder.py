"""The one door to attention metadata.

`build_metadata` is a pure function of the kinds of attention, the positions and the page table, and it is
called inside the traced programs: in prefill, in verify and in every iteration of the draft loop. Nothing
position-dependent outlives the forward pass it was built for, so nothing can be stale.
"""

from collections.abc import Iterable
from typing import Any

from jaxspec.attention.full import FullAttention
from jaxspec.attention.indexed_window import IndexedWindow
from jaxspec.attention.metadata import build
from jaxspec.attention.rows import RowBlock
from jaxspec.attention.sliding_window import SlidingWindow

AttentionKind = FullAttention | SlidingWindow | IndexedWindow


def build_metadata(kinds: Iterable[AttentionKind], block: RowBlock) -> dict[AttentionKind, Any]:
    """Builds the metadata of every kind of attention that a network uses, each by its own builder.

    A row that is not valid writes to page 0 and sees nothing, and so does one whose position has no page: it
    would see page 0, where anything may lie.

    Args:
      kinds: the kinds, repeated or not.
      block: [G, Q] rows.

    Raises:
      TypeError: a kind has no builder.
    """
    return {kind: build(kind, block) for kind in dict.fromkeys(kinds)}
