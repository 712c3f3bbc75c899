"""Slots and visible ranges in pure JAX."""

import jax
import jax.numpy as jnp


def slot_mapping(
    positions: jax.Array, valid: jax.Array, page_table: jax.Array, *, page_size: int
) -> jax.Array:
    """The cache slot of each row: page * P + position mod P.

    A row without a page gets a slot of page 0, which has no owner. These are rows that are not valid, that
    have a position below 0 or not below T * P, or whose table entry is 0.

    Args:
      positions: i32[B, Q].
      valid: bool[B, Q], False for padding rows and finished slots.
      page_table: i32[B, T], page of each block of P positions; 0 if none is assigned.
      page_size: P.

    Returns:
      i32[B, Q] slots.
    """
    width = page_table.shape[1]
    owned = valid & (positions >= 0) & (positions < width * page_size)
    block = jnp.where(owned, positions // page_size, 0)
    page = jnp.take_along_axis(page_table, block, axis=1, mode="promise_in_bounds")
    return jnp.where(owned, page, 0) * page_size + positions % page_size


def place_rows(
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    *,
    page_size: int,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slots that rows write, and the positions that they see with full or sliding-window attention.

    Args:
      positions, valid, page_table, page_size: see `slot_mapping`.
      window: how many positions a row sees, its own included; None for all positions up to its own.

    Returns:
      The slots, the first and the last visible position of each row, all i32[B, Q]. The last position is -1
      for a row whose slot is in page 0, so that it sees nothing.
    """
    slots = slot_mapping(positions, valid, page_table, page_size=page_size)
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - (window - 1), 0)
    return slots, first, jnp.where(slots >= page_size, positions, -1)
