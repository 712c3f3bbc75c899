"""Penalties in pure JAX."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.token_marks import IN_PROMPT


def penalise(
    logits: jax.Array,
    marks: jax.Array,
    drafts: jax.Array,
    seen: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """The logits of rows, changed for the tokens of a text and of the drafts behind it.

    Args:
      logits: f32[B, R, W].
      marks: i32[B, W], from `token_marks`.
      drafts: i32[B, K], the column of each draft; out of range for one that has none.
      seen: i32[R], how many of the drafts each row sees as output, 0 to K.
      repetition: f32[B], divides the positive logits of tokens in the prompt or the output, and multiplies
        the negative ones.
      frequency: f32[B], is subtracted for every time that a token is in the output.
      presence: f32[B], is subtracted if it is in it at all.
    """
    marks, places = marks[:, None], jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # Compared one by one, so that all of this is one pass over the rows.
    for i in range(drafts.shape[1]):
        marks = marks + ((drafts[:, i, None, None] == places) & (seen > i)[:, None])
    count = marks & (IN_PROMPT - 1)
    repetition, frequency, presence = (x[:, None, None] for x in (repetition, frequency, presence))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(marks > 0, repeated, logits)
    return logits - frequency * count - jnp.where(count > 0, presence, 0.0)
