"""Rows by the expert that they chose."""

import jax
import jax.numpy as jnp

FEW_ROWS = 64
"""So many find the others of their expert inside a kernel, sooner than a sort before it would."""


def group_rows(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Rows i32[A] in the order of their experts, and where each of these begins, i32[count + 1].

    Args:
      experts: i32[A], each in 0..count-1.
      count: of experts. The rows of expert e are order[starts[e] : starts[e + 1]].
    """
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    # A search would be a loop of small kernels.
    starts = (experts < jnp.arange(count + 1)[:, None]).sum(axis=1, dtype=jnp.int32)
    return order, starts


def most_tiles(rows: int, count: int, block: int) -> int:
    """How many tiles of `block` rows, none with rows of two experts, so many rows can need."""
    chosen = min(rows, count)
    return chosen + (rows - chosen) // block
