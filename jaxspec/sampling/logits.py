"""Temperature, min-p, top-k and top-p."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.sampling.mode import SamplingMode, can_branch
from jaxspec.sampling.state import SamplingState
from jaxspec.sampling.threshold import kth_largest, mass_threshold


def process_logits(logits: jax.Array, sampling: SamplingState, *, mode: SamplingMode) -> jax.Array:
    """The logits that tokens are drawn from.

    Applies temperature, then min-p, then top-k, then top-p to the renormalised rest. Tokens that tie with the
    last one kept are kept, and so is always the best token.

    Args:
      logits: [B, Q, V], of any float dtype.
      sampling: the parameters of the B slots.
      mode: only `TRUNCATED` applies top-k and top-p.

    Returns:
      f32[B, Q, V], -inf where masked. Rows of slots with temperature 0 are the raw logits.
    """
    logits = logits.astype(jnp.float32)
    sampled = sampling.temperature > 0
    scaled = logits / jnp.where(sampled, sampling.temperature, 1.0)[:, None, None]
    floor = scaled.max(axis=-1) + jnp.log(sampling.min_p)[:, None]
    if mode == SamplingMode.TRUNCATED:
        floor = _where_used(sampled & (sampling.top_k > 0), _top_k, scaled, floor, sampling.top_k)
        floor = _where_used(sampled & (sampling.top_p < 1), _top_p, scaled, floor, sampling.top_p)
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
