"""Layers without a cache: each slot has a state of fixed size, which every row reads and changes.

Of the rows of a pass, those of a prompt change the state for good. Of the rows that verify drafts only the
first does, since its token is certain. The others' inputs are kept, and the next pass first applies those of
the drafts that were accepted. So a state is read and written once in a step, whatever the number of drafts,
and a rejected draft leaves nothing behind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
    is_final = block.unapplied.size == 0
    return (_read if is_final else _verify)(block, kept, rows, recurrence)


def _read(
    block: StateMetadata, kept: States, rows: jax.Array, recurrence: Recurrence
) -> tuple[jax.Array, States]:
    """Groups all of whose rows are final, one after another, as each may go on from the one before it."""
    *arrays, pending = kept

    def read(states: States, group: tuple[StateMetadata, jax.Array]) -> tuple[States, jax.Array]:
        of, rows = group
        before = tuple(jnp.take(array, of.source[None], axis=0, mode="clip") for array in states)
        before = tuple(jnp.where(of.is_start, 0, array).astype(array.dtype) for array in before)
        outputs, after = recurrence.chunk(before, rows[None], of.valid[None])
        for place in (of.place, of.copy):
            states = tuple(_put(array, place[None], new) for array, new in zip(states, after, strict=True))
        return states, outputs[0]

    whole = replace(block, unapplied=block.place)  # of the groups' number, for the scan
    states, outputs = lax.scan(read, tuple(arrays), (whole, rows))
    return outputs, (*states, pending)


def _verify(
    block: StateMetadata, kept: States, rows: jax.Array, recurrence: Recurrence
) -> tuple[jax.Array, States]:
    """Groups of a slot's last token and its drafts.

    The inputs of the last pass's accepted drafts change the state first, then the last token does. The state
    is kept as it is then, with the inputs of the drafts.
    """
    *arrays, pending = kept
    count = rows.shape[1] - 1
    states = tuple(jnp.take(array, block.source, axis=0, mode="clip") for array in arrays)
    accepted = jnp.take(pending, block.source, axis=0, mode="clip")

    def apply(states: States, draft: tuple[jax.Array, jax.Array]) -> tuple[States, None]:
        i, row = draft
        _, after = recurrence.step(states, row)
        return _where(i < block.unapplied, after, states), None

    if most := accepted.shape[1]:
        index = jnp.arange(most, dtype=jnp.int32)
        states, _ = lax.scan(apply, states, (index, jnp.swapaxes(accepted, 0, 1)))
    first, states = recurrence.step(states, rows[:, 0])
    arrays = [_put(array, block.place, new) for array, new in zip(arrays, states, strict=True)]
    if not count:
        return first[:, None], (*arrays, pending)
    drafts = rows[:, 1:]
    place = jnp.minimum(block.place, len(pending))[:, None]  # past the last, it is dropped
    pending = pending.at[place, jnp.arange(count)[None]].set(
        drafts.astype(pending.dtype), mode="drop", wrap_negative_indices=False
    )

    def go_on(states: States, row: jax.Array) -> tuple[States, jax.Array]:
        outputs, states = recurrence.step(states, row)
        return states, outputs

    _, others = lax.scan(go_on, states, jnp.swapaxes(drafts, 0, 1))
    return jnp.concatenate([first[:, None], jnp.swapaxes(others, 0, 1)], axis=1), (*arrays, pending)


def _put(into: jax.Array, place: jax.Array, states: jax.Array) -> jax.Array:
    """Writes states [n, H, ...] to their places in [places, H, ...]; those past the last are dropped."""
    return into.at[place].set(states.astype(into.dtype), mode="drop", wrap_negative_indices=False)


def _where(condition: jax.Array, new: States, old: States) -> States:
    """Of each sequence the new state where bool[n] says so."""
    return tuple(
        jnp.where(condition.reshape(-1, *(1 for _ in one.shape[1:])), one, other)
        for one, other in zip(new, old, strict=True)
    )
