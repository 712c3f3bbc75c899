"""Drawing a token from processed logits."""

import jax
from jaxspec_kernels import random
from jaxspec_kernels.argmax import gumbel_argmax
from jaxspec_kernels.random import Purpose

from jaxspec.sampling.state import SamplingState


def sample(
    logits: jax.Array, sampling: SamplingState, position: jax.Array, purpose: Purpose | jax.Array
) -> jax.Array:
    """Draws a token from softmax(logits) for each slot; takes the argmax where the temperature is 0.

    A row of NaN gives an arbitrary id in range.

    Args:
      logits: f32[B, V] from `process_logits`; they need not be normalised.
      sampling: the parameters of the B slots.
      position: i32[B], position of the row that the logits belong to.
      purpose: the random stream, one for all slots or i32[B]. Tokens drawn without a proposal use
        `Purpose.BONUS`.

    Returns:
      i32[B] token ids.
    """
    keys = random.row_keys(sampling.seed, position, purpose)
    return gumbel_argmax(logits, keys, sampling.temperature > 0)
