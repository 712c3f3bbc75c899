"""Slots and visible ranges in pure JAX."""

import jax
import jax.numpy as jnp


def slot_mapping(
    positions: jax.Array, valid: jax.Array, page_table: jax.Array, *, page_size: int
) -> jax.Array:
    """The cache slot of each row: page * P + position mod P.

    A row that has no page of its own gets a slot of page 0, which is nobody's: a row that is not valid,
    a position below 0 or at T * P and beyond, a table entry 0.

    Args:
      positions: i32[B, Q].
      valid: bool[B, Q], False for padding rows and finished slots.
      page_table: i32[B, T], page of each block of P positions; 0 where none is assigned.
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
    """Where rows write, and what they see under full attention or within a window.

    Args:
      positions, valid, page_table, page_size: see `slot_mapping`.
      window: how many positions a row sees, its own included; None for all up to its own.

    Returns:
      The slots, i32[B, Q], and the first and the last position that each row sees, i32[B, Q] both; the last
      is -1 for a row whose slot lies in page 0, which sees nothing.
    """
    slots = slot_mapping(positions, valid, page_table, page_size=page_size)
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - (window - 1), 0)
    return slots, first, jnp.where(slots >= page_size, positions, -1)
