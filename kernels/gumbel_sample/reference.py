"""Gumbel sampling into a column, in pure JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels import random
from jaxspec_kernels.argmax import argmax, gumbel_argmax
from jaxspec_kernels.random import Purpose


def gumbel_sample(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    step: jax.Array,
    tokens: jax.Array,
    processed: jax.Array | None,
    *,
    purpose: Purpose,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Draws token ~ softmax(logits / temperature) and writes token and processed logits into column `step`.

    In the body of a draft loop, the buffers `tokens` and `processed` are updated in place. A row of NaN gives
    an arbitrary id in range.

    Args:
      logits: f32[B, V].
      temperature: f32[B]; 0 takes the argmax and stores the unchanged logits.
      seed: u32[B, 2], one per request.
      position: i32[B], position of the row that the logits belong to.
      step: i32[], the column, in [0, K).
      tokens: i32[B, K].
      processed: f32[B, K, V]. If it is None, every row is greedy: `temperature` is ignored and no noise is
        drawn.
      purpose: the random stream.
      axis: the mesh axis that the vocabulary is split over, or None. `logits` and `processed` are then this
        device's part, of an even size; the tokens are ids of the whole vocabulary.

    Returns:
      (tokens, processed) with column `step` replaced.
    """
    put = partial(lax.dynamic_update_index_in_dim, index=step, axis=1, allow_negative_indices=False)
    if processed is None:
        best = argmax(logits, axis)
    else:
        row = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        keys = random.row_keys(seed, position, purpose)
        best = gumbel_argmax(row, keys, temperature > 0, axis)
        processed = put(processed, row)
    tokens = put(tokens, best)
    return tokens, processed
