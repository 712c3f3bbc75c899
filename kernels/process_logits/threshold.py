"""Exact thresholds over a vocabulary without sorting it: a radix search over the bits of floats.

Floats are mapped to integers in the same order. What is sought is the largest threshold for which the
elements at or above it are enough. It is found a few bits at a time, from the highest on. Each pass over the
elements compares and adds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SIGN = 0x80000000
_SMALLEST_NORMAL = 0x00800000
_NEGATIVE_INFINITY = 0x007FFFFF  # -inf in the integer order; only NaNs come before it


def kth_largest(x: jax.Array, k: jax.Array, *, digit_bits: int) -> jax.Array:
    """The k-th largest value of x f32[..., V], for k i32[...] of at least 1; -inf where k > V.

    Args:
      digit_bits: see `mass_threshold`.
    """

    def reached(at_least: jax.Array) -> jax.Array:
        return jnp.sum(at_least, axis=-1, dtype=jnp.int32) >= k[..., None]

    return _largest(x, reached, digit_bits)


def mass_threshold(x: jax.Array, weight: jax.Array, mass: jax.Array, *, digit_bits: int) -> jax.Array:
    """The largest t, f32[...], with sum(weight where x >= t) >= mass; -inf if the sum is always smaller.

    Args:
      x: f32[..., V].
      weight: f32[..., V], not negative.
      mass: f32[...], above 0.
      digit_bits: bits of t that one pass over x determines, a divisor of 32. A pass computes the sums for
        2^digit_bits - 1 candidates: few wide passes suit a GPU, many narrow ones a CPU.
    """

    def reached(at_least: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(at_least, weight[..., None, :], 0), axis=-1) >= mass[..., None]

    return _largest(x, reached, digit_bits)


def _largest(x: jax.Array, reached: Callable[[jax.Array], jax.Array], digit_bits: int) -> jax.Array:
    """The largest t for which reached(x >= t) holds; `reached` maps bool[..., C, V] to bool[..., C]."""
    digits = jnp.arange(1, 2**digit_bits, dtype=jnp.uint32)

    def fix_digit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * jnp.uint32(i)
        candidates = _float(prefix[..., None] | (digits << shift))
        digit = jnp.sum(reached(x[..., None, :] >= candidates[..., None]), axis=-1, dtype=jnp.uint32)
        return prefix | (digit << shift)

    return _float(lax.fori_loop(0, 32 // digit_bits, fix_digit, jnp.zeros(x.shape[:-1], jnp.uint32)))


def _float(order: jax.Array) -> jax.Array:
    """The float32 at index u32[...] of the integer order; subnormals become 0, as they do on a CPU."""
    order = jnp.maximum(order, jnp.uint32(_NEGATIVE_INFINITY))
    bits = jnp.where(order >= jnp.uint32(_SIGN), order ^ jnp.uint32(_SIGN), ~order)
    subnormal = (bits & ~jnp.uint32(_SIGN)) < jnp.uint32(_SMALLEST_NORMAL)
    return lax.bitcast_convert_type(jnp.where(subnormal, jnp.uint32(0), bits), jnp.float32)
