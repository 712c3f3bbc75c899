"""Builds attention metadata: the only way to obtain it.

`build_metadata` is a pure function of the kinds of attention, the positions and the page table. It is called
inside the traced programs: in prefill, in verify and in every iteration of the draft loop. Position-dependent
data never outlives the forward pass that it was built for, so it cannot be stale.
"""

from collections.abc import Iterable
from typing import Any

from jaxspec.attention.compressed import CompressedAttention
from jaxspec.attention.full import FullAttention
from jaxspec.attention.metadata import build
from jaxspec.attention.position_wise import PositionWise
from jaxspec.attention.recurrent import Recurrent
from jaxspec.attention.rows import RowBlock
from jaxspec.attention.sliding_window import SlidingWindow

AttentionKind = FullAttention | SlidingWindow | CompressedAttention | Recurrent | PositionWise


def build_metadata(kinds: Iterable[AttentionKind], block: RowBlock) -> dict[AttentionKind, Any]:
    """Builds the metadata of every kind of attention that a network uses, each by its own builder.

    A row that is not valid, or whose position has no page, writes to page 0 and sees no position: the content
    of page 0 is arbitrary.

    Args:
      kinds: the kinds of all layers; duplicates are built once.
      block: the rows, [G, Q].

    Returns:
      The metadata of each kind.

    Raises:
      TypeError: a kind has no builder.
    """
    return {kind: build(kind, block) for kind in dict.fromkeys(kinds)}
