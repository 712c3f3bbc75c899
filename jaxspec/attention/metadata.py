"""Attention metadata: what a layer must know about positions, made afresh wherever positions move.

Every kind of attention has a file with its builder, registered on `build`. Layers never call one:
`build_metadata` is the only way to obtain metadata.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import jax
from jaxspec_kernels.slot_mapping import place_rows

from jaxspec.attention.rows import RowBlock


@singledispatch
def build(kind: Any, block: RowBlock) -> Any:
    """The metadata of one kind of attention, for `build_metadata` alone.

    Raises:
      TypeError: there is no builder for such a kind.
    """
    raise TypeError(f"no attention metadata builder for {kind!r}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """The metadata of every kind whose rows see a range of positions: where they write, and that range.

    Attributes:
      slots: i32[G, Q], page * P + offset to write; in page 0 for a row that is not kept.
      first: i32[G, Q], first visible position.
      last: i32[G, Q], last visible position, inclusive; -1 for a row that is not kept.
      page_table: i32[G, T].
    """

    slots: jax.Array
    first: jax.Array
    last: jax.Array
    page_table: jax.Array


@singledispatch
def visible_range(kind: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and last position that is seen for itself, i32[G, Q] each, by rows at `positions` i32[G, Q].

    Raises:
      TypeError: there is no such range for the kind.
    """
    raise TypeError(f"no range of visible positions for {kind!r}")


def build_range(block: RowBlock, window: int | None) -> AttentionMetadata:
    """The builder of the kinds whose rows see the last `window` positions up to their own; with None, all."""
    table = block.page_table
    slots, first, last = place_rows(
        block.positions, block.valid, table.pages, page_size=table.page_size, window=window
    )
    return AttentionMetadata(slots, first, last, table.pages)
