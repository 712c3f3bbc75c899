"""The rows of a forward pass: which slot, which positions, which pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """The pages that hold the positions of each slot.

    Attributes:
      pages: i32[..., T], the page of each P positions in turn; 0 where the slot owns none.
      page_size: P, static.
    """

    pages: jax.Array
    page_size: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlock:
    """G groups of Q rows, each group at consecutive positions of one slot.

    Several groups may be pieces of one sequence: all rows of a forward pass are written before any attends.

    Attributes:
      positions: i32[G, Q], the position of each row in its sequence.
      valid: bool[G, Q]; a row that is not valid is computed, kept nowhere and seen by none.
      page_table: of [G, T], each group's own row.
    """

    positions: jax.Array
    valid: jax.Array
    page_table: PageTable

    @property
    def shape(self) -> tuple[int, int]:
        """G and Q."""
        groups, width = self.positions.shape
        return groups, width


RowBlocks = tuple[RowBlock, ...]
"""What a forward pass runs: its N flat rows are the blocks' rows, one after another."""


def join_rows(parts: Iterable[jax.Array]) -> jax.Array:
    """[N, ...] of the blocks' [G, Q, ...]; that of a single block is only reshaped."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split_rows(x: jax.Array, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """The inverse of `join_rows`, for blocks of these shapes (G, Q)."""
    if len(shapes) == 1:
        return [x.reshape(*shapes[0], *x.shape[1:])]
    parts, start = [], 0
    for groups, width in shapes:
        stop = start + groups * width
        parts.append(x[start:stop].reshape(groups, width, *x.shape[1:]))
        start = stop
    return parts


def row_positions(blocks: RowBlocks) -> jax.Array:
    """i32[N]."""
    return join_rows(block.positions for block in blocks)
