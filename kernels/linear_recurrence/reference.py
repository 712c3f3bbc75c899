"""A pass over the states of a linear recurrence in pure JAX, of a step's rows and of prompts."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.linear_recurrence.rules import Rule
from jaxspec_kernels.linear_recurrence.state_loops import read_rows, verify_rows


def recurrence_step(
    state: jax.Array,
    inputs: jax.Array,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A rule over each slot's last token and its drafts; `state_loops.verify_rows` says which rows count.

    Args:
      state: f32[places, H, r, D, V], updated.
      inputs: [places, H, W - 1, channels], the last inputs of the convolution, updated.
      pending: [B, K, H, F], updated.
      rows: [G, Q, H, F], as the rule says.
      place, unapplied: i32[G].
      rule: with the layer's weights.

    Returns:
      The updated arrays, and the outputs f32[G, Q, H, r, V], zeros for a group without a place.
    """
    (state, inputs), pending, outputs = verify_rows(
        rule.step, (state, inputs), pending, rows, place, unapplied
    )
    has_place = (place < len(state)).reshape(-1, 1, 1, 1, 1)
    return state, inputs, pending, jnp.where(has_place, outputs, 0)


def recurrence_scan(
    state: jax.Array,
    inputs: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    is_start: jax.Array,
    source: jax.Array,
    place: jax.Array,
    copy: jax.Array,
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A rule over rows of prompts; `state_loops.read_rows` says which rows count, and where states are.

    Args:
      state, inputs, rule: as in `recurrence_step`.
      rows: [G, C, H, F].
      count, source, place, copy: i32[G].
      is_start: bool[G].

    Returns:
      The updated arrays, and the outputs f32[G, C, H, r, V]. Those of rows that do not count are finite.
    """
    (state, inputs), outputs = read_rows(
        rule.chunk, (state, inputs), rows, count, is_start, source, place, copy
    )
    return state, inputs, outputs
