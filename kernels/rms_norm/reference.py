"""Norm in pure JAX."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.row_sum import row_sum


def rms_norm(x: jax.Array, factors: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x ** 2) + eps) * factors over the last axis.

    A row's result is independent of the number of rows on a CPU.

    Args:
      x: [..., M].
      factors: [M], of the same dtype. In 16 bits the normed row is rounded, and then its product with these.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(mean_of_squares(wide) + eps)
    return normed.astype(x.dtype) * factors


Norm = Callable[[jax.Array, jax.Array, float], jax.Array]


def with_gradients(kernel: Norm) -> Norm:
    """A kernel that computes `rms_norm`, with the derivatives of this reference."""
    norm = jax.custom_jvp(kernel, nondiff_argnums=(2,))

    @norm.defjvp
    def tangent(eps: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        _, tangent = jax.jvp(partial(rms_norm, eps=eps), primals, tangents)
        return norm(*primals, eps), tangent

    return norm


def add_rms_norm(
    x: jax.Array, stream: jax.Array, bias: jax.Array | None, factors: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`stream + (x + bias)` and its `rms_norm`, with every intermediate result rounded to the dtype of x.

    Args:
      x, stream: [N, M].
      bias, factors: [M]; without a bias, None.
    """
    total = stream + (x if bias is None else x + bias)
    return total, rms_norm(total, factors, eps)


def mean_of_squares(x: jax.Array) -> jax.Array:
    """The mean of x^2 over the last axis, f32[..., 1] from f32[..., M], independent of the number of rows.

    On a CPU, XLA sums eight rows or more in another order than fewer rows. Where activations are rounded to
    8 bits, such a difference in the last bit grows, and an answer would depend on the other requests.
    """
    if is_exact():
        return row_sum(x * x)[..., None] / x.shape[-1]
    total = lax.platform_dependent(
        x * x, cpu=_sum_by_halves, default=partial(jnp.sum, axis=-1, keepdims=True)
    )
    return total / x.shape[-1]


def _sum_by_halves(x: jax.Array) -> jax.Array:
    """The sum over the last axis, [..., 1], by elementwise additions, whose order XLA does not change."""
    while (width := x.shape[-1]) > 1:
        even = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width % 2)])
        x = even[..., : even.shape[-1] // 2] + even[..., even.shape[-1] // 2 :]
    return x
