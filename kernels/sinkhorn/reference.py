"""The Sinkhorn-Knopp algorithm in pure JAX."""

import jax
from jax import lax


def sinkhorn(scores: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Makes the exponentials of scores all but doubly stochastic.

    Args:
      scores: f32[N, S, S].
      iterations: how often columns are divided by their sums, which comes last. Before each time, rows are;
        the first time, by the softmax.
      eps: is added to the softmax and to every sum.

    Returns:
      f32[N, S, S], whose columns add up to 1 and whose rows nearly do.

    Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`.
    """

    def normalise(mix: jax.Array, axis: int) -> jax.Array:
        return mix / (mix.sum(axis=axis, keepdims=True) + eps)

    mix = normalise(jax.nn.softmax(scores, axis=-1) + eps, -2)
    return lax.fori_loop(1, iterations, lambda _, mix: normalise(normalise(mix, -1), -2), mix)
