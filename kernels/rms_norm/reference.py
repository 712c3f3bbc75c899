"""Norm in pure JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, factors: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x ** 2) + eps) * factors over the last axis.

    The same for a row whatever rows are beside it.

    Args:
      x: f32[..., M].
      factors: f32[M].
    """
    return x * lax.rsqrt(mean_of_squares(x) + eps) * factors


def mean_of_squares(x: jax.Array) -> jax.Array:
    """f32[..., 1] over the last axis of f32[..., M], the same for a row whatever rows are beside it.

    XLA on a CPU sums eight rows or more in another order than fewer. Rows that are rounded to 8 bits carry
    such a last bit on, so that an answer would depend on its company.
    """
    total = lax.platform_dependent(
        x * x, cpu=_sum_by_halves, default=partial(jnp.sum, axis=-1, keepdims=True)
    )
    return total / x.shape[-1]


def _sum_by_halves(x: jax.Array) -> jax.Array:
    """[..., 1] of [..., M], in an order that is written down: no compiler changes that of single sums."""
    while (width := x.shape[-1]) > 1:
        even = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width % 2)])
        x = even[..., : even.shape[-1] // 2] + even[..., even.shape[-1] // 2 :]
    return x
