"""Sums in pure JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.op import device

_LANES = 16


def row_sum(x: jax.Array) -> jax.Array:
    """The sums f32[...] of x f32[..., V] over V."""
    return x.sum(axis=-1)


def sum_in_order(x: jax.Array, axis: int = -1) -> jax.Array:
    """The sum over a short axis, which is kept. The order of XLA's reductions depends on the number of rows;
    that of separate additions does not."""
    first, *others = jnp.split(x, x.shape[axis], axis=axis)
    return sum(others, first)


def row_log(x: jax.Array) -> jax.Array:
    """log(x), each number's the same whatever the shape of x.

    On a CPU, XLA may compute a few of the numbers one by one, with another function than those that fill
    vectors, which rounds differently. Nothing is left over of a multiple of 16 numbers.
    """
    if device().platform != "cpu":
        return jnp.log(x)
    count = math.prod(x.shape)
    padded = jnp.pad(x.reshape(count), (0, -count % _LANES), constant_values=1.0)
    logs = lax.optimization_barrier(jnp.log(lax.optimization_barrier(padded)))
    return logs[:count].reshape(x.shape)
