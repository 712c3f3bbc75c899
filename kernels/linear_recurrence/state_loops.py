"""The loops over rows of recurrent layers in pure JAX, for any rule.

A rule is a function of the states of n sequences, a tuple of arrays [n, H, ...]. The states of all slots, and
copies of some, are arrays [places, H, ...].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

States = tuple[jax.Array, ...]


def verify_rows(
    step: Callable[[States, jax.Array], tuple[jax.Array, States]],
    arrays: States,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
) -> tuple[States, jax.Array, jax.Array]:
    """Runs each slot's last token and its drafts.

    The inputs of the last pass's accepted drafts change a state first, then the last token does. The state is
    kept as it is then, with the inputs of the drafts.

    Args:
      step: (states, rows [G, H, F]) -> the rows' outputs [G, H, ...], and the states behind them.
      arrays: [places, H, ...], updated.
      pending: [B, K, H, F], the drafts' inputs of the last pass by slot, updated. The slots are the first B
        places, and a pass has at most K drafts.
      rows: [G, Q, H, F], the last token and Q - 1 drafts.
      place: i32[G], each group's slot, no two alike; past the last place for a group whose states stay.
      unapplied: i32[G], how many of the pending inputs are of drafts that were accepted. The others may hold
        anything.

    Returns:
      The arrays, the pending inputs, and the rows' outputs [G, Q, H, ...].
    """
    states = tuple(jnp.take(array, place, axis=0, mode="clip") for array in arrays)
    accepted = jnp.take(pending, place, axis=0, mode="clip")

    def apply(states: States, draft: tuple[jax.Array, jax.Array]) -> tuple[States, None]:
        i, row = draft
        _, after = step(states, row)
        return _where(i < unapplied, after, states), None

    if most := accepted.shape[1]:
        index = jnp.arange(most, dtype=jnp.int32)
        states, _ = lax.scan(apply, states, (index, jnp.swapaxes(accepted, 0, 1)))
    first, states = step(states, rows[:, 0])
    arrays = tuple(_put(array, place, new) for array, new in zip(arrays, states, strict=True))
    drafts = rows[:, 1:]
    if not drafts.shape[1]:
        return arrays, pending, first[:, None]
    slot = jnp.minimum(place, len(pending))[:, None]  # past the last, it is dropped
    pending = pending.at[slot, jnp.arange(drafts.shape[1])[None]].set(
        drafts.astype(pending.dtype), mode="drop", wrap_negative_indices=False
    )

    def go_on(states: States, row: jax.Array) -> tuple[States, jax.Array]:
        outputs, states = step(states, row)
        return states, outputs

    _, others = lax.scan(go_on, states, jnp.swapaxes(drafts, 0, 1))
    return arrays, pending, jnp.concatenate([first[:, None], jnp.swapaxes(others, 0, 1)], axis=1)


def read_rows(
    chunk: Callable[[States, jax.Array, jax.Array], tuple[jax.Array, States]],
    arrays: States,
    rows: jax.Array,
    count: jax.Array,
    is_start: jax.Array,
    source: jax.Array,
    place: jax.Array,
    copy: jax.Array,
) -> tuple[States, jax.Array]:
    """Runs groups of rows of prompts, one after another, as each may go on from one before it.

    Args:
      chunk: (states, rows [1, C, H, F], valid bool[1, C]) -> the rows' outputs [1, C, H, ...], and the states
        behind the valid rows, which are the first ones.
      arrays: [places, H, ...], updated.
      rows: [G, C, H, F].
      count: i32[G], the first rows of each group count; the others may hold anything.
      is_start: bool[G], whether the group begins its text, and so with a state of zeros.
      source: i32[G], the place of the state before the group.
      place, copy: i32[G], two places for the state behind it; past the last for none.

    Returns:
      The arrays, and the rows' outputs [G, C, H, ...].
    """
    valid = jnp.arange(rows.shape[1], dtype=jnp.int32) < count[:, None]

    def read(arrays: States, group: States) -> tuple[States, jax.Array]:
        rows, valid, is_start, source, *places = group
        before = tuple(jnp.take(array, source[None], axis=0, mode="clip") for array in arrays)
        before = tuple(jnp.where(is_start, 0, array).astype(array.dtype) for array in before)
        outputs, after = chunk(before, rows[None], valid[None])
        for place in places:
            arrays = tuple(_put(array, place[None], new) for array, new in zip(arrays, after, strict=True))
        return arrays, outputs[0]

    return lax.scan(read, tuple(arrays), (rows, valid, is_start, source, place, copy))


def _put(into: jax.Array, place: jax.Array, states: jax.Array) -> jax.Array:
    """Writes states [n, H, ...] to their places in [places, H, ...]; those past the last are dropped."""
    return into.at[place].set(states.astype(into.dtype), mode="drop", wrap_negative_indices=False)


def _where(condition: jax.Array, new: States, old: States) -> States:
    """Of each sequence the new state where bool[n] says so."""
    return tuple(
        jnp.where(condition.reshape(-1, *(1 for _ in one.shape[1:])), one, other)
        for one, other in zip(new, old, strict=True)
    )
