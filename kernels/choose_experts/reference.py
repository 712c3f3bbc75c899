"""The choice of experts in pure JAX."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxspec_kernels.row_sum import row_sum, sum_in_order

Softmax = Literal["chosen", "all"]


def choose_experts(
    scores: jax.Array, *, keep: int, softmax: Softmax | None = None
) -> tuple[jax.Array, jax.Array]:
    """The experts with the largest scores. Of equal scores, the one of the lower index comes first.

    Args:
      scores: f32[R, E].
      keep: how many to choose for each row, at most E.
      softmax: whether weights are the softmax of scores, over the chosen ones or over all; None for weights
        that are the scores.

    Returns:
      Weights f32[R, keep], the largest first, and experts i32[R, keep].
    """
    best, chosen = jax.lax.top_k(scores, keep)
    if softmax is None:
        return best, chosen
    weights = jnp.exp(best - best[:, :1])
    if softmax == "chosen":
        return weights / sum_in_order(weights), chosen
    return weights / row_sum(jnp.exp(scores - best[:, :1]))[:, None], chosen
