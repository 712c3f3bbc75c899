"""Counts of tokens in pure JAX."""

from typing import Any

import jax
import jax.numpy as jnp

IN_PROMPT = 1 << 30
"""What the mark of a token is above its count in the output, if the prompt has it."""
_DROP: Any = {"mode": "drop", "wrap_negative_indices": False}


def token_marks(columns: jax.Array, prompt_length: jax.Array, length: jax.Array, *, size: int) -> jax.Array:
    """The mark of each token: its count in the output, plus `IN_PROMPT` if it is in the prompt.

    Args:
      columns: i32[B, X], the column of each token of a text; out of range for one that has none.
      prompt_length, length: i32[B], tokens of the prompt, and of the whole text, 0 to X.
      size: W.

    Returns:
      i32[B, W].
    """
    slots = jnp.arange(len(length))[:, None]
    place = jnp.arange(columns.shape[1], dtype=jnp.int32)
    is_prompt = (place < prompt_length[:, None]) & (place < length[:, None])
    is_output = (place >= prompt_length[:, None]) & (place < length[:, None])
    marks = jnp.zeros((len(length), size), jnp.int32)
    marks = marks.at[slots, jnp.where(is_prompt, columns, size)].set(IN_PROMPT, **_DROP)
    return marks.at[slots, jnp.where(is_output, columns, size)].add(1, **_DROP)
