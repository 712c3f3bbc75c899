"""Attention metadata: where rows write and what they see, built anew for every forward pass.

Every kind of attention has a file with its builder, registered on `build`. Only `build_metadata` calls it.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import jax
from jaxspec_kernels.slot_mapping import place_rows

from jaxspec.attention.rows import RowBlock


@singledispatch
def build(kind: Any, block: RowBlock) -> Any:
    """The metadata of one kind of attention; called only by `build_metadata`.

    Raises:
      TypeError: the kind has no builder.
    """
    raise TypeError(f"no attention metadata builder for {kind!r}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """The metadata of kinds of attention whose rows see a contiguous range of positions.

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
    """The first and last position, i32[G, Q] each, that rows at `positions` i32[G, Q] see uncompressed.

    Raises:
      TypeError: the kind has no such range.
    """
    raise TypeError(f"no range of visible positions for {kind!r}")


def build_range(block: RowBlock, window: int | None) -> AttentionMetadata:
    """The metadata of rows that see the last `window` positions, their own included; all of them for None."""
    table = block.page_table
    slots, first, last = place_rows(
        block.positions, block.valid, table.pages, page_size=table.page_size, window=window
    )
    return AttentionMetadata(slots, first, last, table.pages)
