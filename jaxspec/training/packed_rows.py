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
      positions: i32[B, S], each token's place in its own conversation.
      segments: i32[B, S], which conversation of the row; 0 is padding.
      answer: bool[B, S], the token is part of an answer.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    answer: jax.Array


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """x[:, i + by] at i, [B, S, ...]; zero (or False) past the end."""
    padding = [(0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, by:], padding)


def run_target(
    target: Target, rows: PackedRows, capture: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The target's hidden states after its final norm [B * S, M], and those that `capture` names."""
    memory = PackedMemory(target.kinds, rows.positions, rows.segments)
    hidden, captured, _ = target(rows.tokens.reshape(-1), rows.positions.reshape(-1), memory, capture=capture)
    return hidden, captured
