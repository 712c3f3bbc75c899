"""Attention metadata: what a layer must know about positions, made afresh wherever positions move.

Every kind of attention has a file with its builder, registered on `build`. Layers never call one:
`build_metadata` is the only way to obtain metadata.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.attention.rows import PageTable


@dataclass(frozen=True)
class PlacedRows:
    """The rows of one block, and where the page table puts them.

    Attributes:
      positions: i32[G, Q], the position of each row in its sequence.
      slots: i32[G, Q], page * P + offset of the row's own position; in page 0 for a row that is not kept.
      kept: bool[G, Q]; a row that is not kept writes to page 0 and sees nothing.
      page_table: of [G, T].
    """

    positions: jax.Array
    slots: jax.Array
    kept: jax.Array
    page_table: PageTable


@singledispatch
def build(kind: Any, rows: PlacedRows) -> Any:
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


def build_range(kind: Any, rows: PlacedRows) -> AttentionMetadata:
    """The builder of the kinds whose rows see the range of `visible_range` and nothing else."""
    first, last = visible_range(kind, rows.positions)
    return AttentionMetadata(
        slots=rows.slots,
        first=first,
        last=jnp.where(rows.kept, last, -1),
        page_table=rows.page_table.pages,
    )
