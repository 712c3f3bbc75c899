"""Temperature, min-p, top-k and top-p in pure JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.op import can_branch
from jaxspec_kernels.process_logits.threshold import kth_largest, mass_threshold


def process_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    truncated: bool,
) -> jax.Array:
    """The logits that tokens are drawn from.

    Applies temperature, then min-p, then top-k, then top-p to the renormalised rest. Tokens that tie with the
    last one kept are kept too, and the best token always is.

    Args:
      logits: f32[B, Q, V].
      temperature: f32[B]; rows with 0 stay as they are.
      top_k: i32[B]; 0 or less keeps all.
      top_p, min_p: f32[B]; 1 and 0 keep all.
      truncated: whether to apply top-k and top-p.

    Returns:
      f32[B, Q, V], -inf where masked.
    """
    sampled = temperature > 0
    scaled = logits / jnp.where(sampled, temperature, 1.0)[:, None, None]
    floor = scaled.max(axis=-1) + jnp.log(min_p)[:, None]
    if truncated:
        floor = _where_used(sampled & (top_k > 0), _top_k, scaled, floor, top_k)
        floor = _where_used(sampled & (top_p < 1), _top_p, scaled, floor, top_p)
    return jnp.where(sampled[:, None, None] & (scaled < floor[..., None]), -jnp.inf, scaled)


def _where_used(
    used: jax.Array, raise_floor: Callable, scaled: jax.Array, floor: jax.Array, parameter: jax.Array
) -> jax.Array:
    """The floor f32[B, Q], raised in the slots where bool[B] `used` is true.

    If no slot uses the parameter, the search is skipped on backends where programs can branch.
    """

    def search(digit_bits: int) -> jax.Array:
        return jnp.where(used[:, None], raise_floor(scaled, floor, parameter[:, None], digit_bits), floor)

    if not can_branch():
        return search(digit_bits=4)
    return lax.cond(used.any(), lambda: search(digit_bits=1), lambda: floor)


def _top_k(scaled: jax.Array, floor: jax.Array, k: jax.Array, digit_bits: int) -> jax.Array:
    kth = kth_largest(scaled, jnp.broadcast_to(k, floor.shape), digit_bits=digit_bits)
    return jnp.maximum(floor, kth)


def _top_p(scaled: jax.Array, floor: jax.Array, p: jax.Array, digit_bits: int) -> jax.Array:
    weight = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    left = jnp.sum(jnp.where(scaled >= floor[..., None], weight, 0), axis=-1)
    mass = jnp.maximum(p * left, jnp.finfo(jnp.float32).tiny)
    return jnp.maximum(floor, mass_threshold(scaled, weight, mass, digit_bits=digit_bits))
