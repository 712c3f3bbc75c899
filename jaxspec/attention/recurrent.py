"""Layers without a cache: each slot has a state of fixed size, which every row reads and changes.

Of the rows of a pass, those of a prompt change the state for good. Of the rows that verify drafts only the
first does, since its token is certain. The others' inputs are kept, and the next pass first applies those of
the drafts that were accepted. So a state is read and written once in a step, whatever the number of drafts,
and a rejected draft leaves nothing behind.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels.linear_recurrence.state_loops import read_rows, verify_rows

from jaxspec.attention.memory import Recurrence, States
from jaxspec.attention.metadata import build
from jaxspec.attention.rows import RowBlock


@dataclass(frozen=True)
class Recurrent:
    """A layer whose rows see the past through a state."""


def has_states(kinds: Iterable[Any]) -> bool:
    """Whether a network whose layers are of these kinds has recurrent layers."""
    return any(isinstance(kind, Recurrent) for kind in kinds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateMetadata:
    """Which states the groups of a block read and leave.

    Attributes:
      valid: bool[G, Q], the rows that change a state; the first ones of each group.
      is_start: bool[G], whether the group begins its text, and so with a state of zeros.
      source: i32[G], the place of the state before the group's first row.
      place: i32[G], the place of the state after its last final row; past the last for a group without rows.
      copy: i32[G], a second place for it; past the last for none.
      unapplied: i32[G], of a block that verifies drafts, how many inputs that were kept in the last pass are
        to be applied first. Of size zero for a block all of whose rows are final.
    """

    valid: jax.Array
    is_start: jax.Array
    source: jax.Array
    place: jax.Array
    copy: jax.Array
    unapplied: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """G and Q."""
        groups, width = self.valid.shape
        return groups, width


@build.register
def _(kind: Recurrent, block: RowBlock) -> StateMetadata:
    states = block.states
    assert states is not None, "the rows of a network with recurrent layers need `RowBlock.states`"
    has_rows = block.valid.any(axis=1)
    nowhere = jnp.iinfo(jnp.int32).max
    return StateMetadata(
        valid=block.valid,
        is_start=block.positions[:, 0] == 0,
        source=states.source,
        place=jnp.where(has_rows, states.place, nowhere),
        copy=jnp.where(has_rows, states.copy, nowhere),
        unapplied=states.unapplied,
    )


def run_block(
    block: StateMetadata, kept: States, rows: jax.Array, recurrence: Recurrence
) -> tuple[jax.Array, States]:
    """Runs a recurrent layer over the rows of a block.

    Args:
      kept: the layer's cache.
      rows: [G, Q, H, F].

    Returns:
      Their outputs [G, Q, H, ...], and the cache.
    """
    *arrays, pending = kept
    states = tuple(arrays)
    if block.unapplied.size:
        verify = recurrence.verify or partial(verify_rows, recurrence.step)
        states, pending, outputs = verify(states, pending, rows, block.place, block.unapplied)
    else:
        read = recurrence.read or partial(read_rows, recurrence.chunk)
        count = block.valid.sum(axis=1, dtype=jnp.int32)
        states, outputs = read(states, rows, count, block.is_start, block.source, block.place, block.copy)
    return outputs, (*states, pending)
