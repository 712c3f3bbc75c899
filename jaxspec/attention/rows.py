"""The rows of a forward pass: their positions and page tables, and how they are grouped into blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """The pages that hold the positions of each slot.

    Attributes:
      pages: i32[..., T]; entry t is the page of positions t * P to (t + 1) * P - 1, 0 if there is none.
      page_size: P, static.
    """

    pages: jax.Array
    page_size: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StatePlaces:
    """Where recurrent layers find and leave the states of a block's groups.

    Attributes:
      place: i32[G], where the slot of a group keeps its state.
      source: i32[G], where the state before the group's first row is: that place, or the one of a copy.
      copy: i32[G], where to leave a copy of the state after its last row; past the last place for none.
      unapplied: i32[G], of groups that verify drafts, how many drafts of the last pass were accepted and are
        not in the state yet. Of size zero for a block without drafts, all of whose rows are final.
    """

    place: jax.Array
    source: jax.Array
    copy: jax.Array
    unapplied: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlock:
    """G groups of Q rows, each group at consecutive positions of one slot.

    Several groups may be chunks of one sequence, because all rows of a pass are written before any attends.
    With recurrent layers they stand in the order of their positions.

    Attributes:
      positions: i32[G, Q], the position of each row in its sequence.
      valid: bool[G, Q]; a row that is not valid is computed, but not kept and not seen by other rows.
      page_table: of shape [G, T], one row of pages per group.
      output: i32[G], for each group the index of the one row whose output is needed; None if every row's is.
        The last layer computes only what these rows need.
      states: the states that the groups read and leave; None for a network without recurrent layers.
    """

    positions: jax.Array
    valid: jax.Array
    page_table: PageTable
    output: jax.Array | None = None
    states: StatePlaces | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """G and Q."""
        groups, width = self.positions.shape
        return groups, width

    @property
    def outputs(self) -> "RowBlock":
        """The rows whose output is needed, as a block of their own."""
        if self.output is None:
            return self
        at = self.output[:, None]
        return RowBlock(
            jnp.take_along_axis(self.positions, at, axis=1, mode="clip"),
            jnp.take_along_axis(self.valid, at, axis=1, mode="clip"),
            self.page_table,
            states=self.states,
        )


RowBlocks = tuple[RowBlock, ...]
"""The blocks of a forward pass. Its N flat rows are the blocks' rows, one block after another."""


def join_rows(parts: Iterable[jax.Array]) -> jax.Array:
    """Joins the blocks' arrays [G, Q, ...] to [N, ...]; a single one is only reshaped."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split_rows(x: jax.Array, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """The inverse of `join_rows`: splits x [N, ...] into arrays [G, Q, ...] of these shapes (G, Q)."""
    if len(shapes) == 1:
        return [x.reshape(*shapes[0], *x.shape[1:])]
    parts, start = [], 0
    for groups, width in shapes:
        stop = start + groups * width
        parts.append(x[start:stop].reshape(groups, width, *x.shape[1:]))
        start = stop
    return parts


def output_rows(blocks: RowBlocks) -> jax.Array | None:
    """The indices of the flat rows whose output is needed, i32[N'] in order; None if every row's is."""
    if all(block.output is None for block in blocks):
        return None
    parts, start = [], 0
    for block in blocks:
        groups, width = block.shape
        if block.output is None:
            parts.append(start + jnp.arange(groups * width, dtype=jnp.int32))
        else:
            parts.append(start + jnp.arange(groups, dtype=jnp.int32) * width + block.output)
        start += groups * width
    return jnp.concatenate(parts)


def take_rows(x: jax.Array, rows: jax.Array | None) -> jax.Array:
    """The rows of x [N, ...] at the indices `rows` of `output_rows`; all of them for None."""
    return x if rows is None else jnp.take(x, rows, axis=0, mode="clip")


def row_positions(blocks: RowBlocks) -> jax.Array:
    """The positions of the flat rows, i32[N]."""
    return join_rows(block.positions for block in blocks)
