"""A batch of packed conversations on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.attention import PackedMemory
from jaxspec.drafters.base import Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Several conversations per row.

    Attributes:
      tokens: i32[B, S].
      positions: i32[B, S], position of each token in its conversation.
      segments: i32[B, S], number of the conversation in the row, from 1; 0 is padding.
      answer: bool[B, S], whether the token is part of an answer.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    answer: jax.Array


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """Shifts [B, S, ...]: element i is x[:, i + by], and zero (or False) past the end."""
    padding = [(0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, by:], padding)


def run_target(
    target: Target, rows: PackedRows, capture: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The target's hidden states after its final norm, [B * S, M], and those of the layers in `capture`."""
    memory = PackedMemory(target.kinds, rows.positions, rows.segments)
    hidden, captured, _ = target(rows.tokens.reshape(-1), rows.positions.reshape(-1), memory, capture=capture)
    return hidden, captured
