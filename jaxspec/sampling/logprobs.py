"""Log-probabilities of emitted tokens, and the most likely tokens in their places."""

from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxspec_kernels.argmax import row_max
from jaxspec_kernels.row_sum import row_log, row_sum, sum_in_order

from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams
from jaxspec.sharding import all_gather, local_start

_GROUP = 64


class Logprobs(IntEnum):
    """What a program reports of the distributions of the tokens that it emits.

    Attributes:
      NONE: nothing.
      CHOSEN: the log-probability of every emitted token.
      TOP: also the `MAX_LOGPROBS` most likely tokens in its place.
    """

    NONE = 0
    CHOSEN = 1
    TOP = 2


def required_logprobs(params: SamplingParams) -> Logprobs:
    """The least report that serves a request."""
    if params.logprobs is None:
        return Logprobs.NONE
    return Logprobs.TOP if params.logprobs else Logprobs.CHOSEN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of tokens of any shape `[...]`; what is not reported has size zero.

    Attributes:
      chosen: f32[...], of each token; [..., 0] in place of the last axis if there are none.
      top_tokens, top: i32 and f32[..., n], the most likely tokens, the likeliest first, and their
        log-probabilities, which are -inf for tokens that cannot be drawn.
    """

    chosen: jax.Array
    top_tokens: jax.Array
    top: jax.Array

    @classmethod
    def none(cls, shape: tuple[int, ...], report: Logprobs, vocab_size: int) -> "TokenLogprobs":
        """Zeros for tokens of this shape."""
        if report == Logprobs.NONE:
            shape = (*shape[:-1], 0)
        top = (*shape, min(MAX_LOGPROBS, vocab_size) if report == Logprobs.TOP else 0)
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32))


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, report: Logprobs, *, axis: str | None = None
) -> TokenLogprobs:
    """The log-probabilities of tokens under softmax(logits).

    Args:
      logits: [..., V], of any float dtype; sums are computed in float32.
      tokens: i32[...], ids in range.
      axis: the mesh axis that V is split over, as for `all_gather`; None if V is whole.
    """
    logits = logits.astype(jnp.float32)
    first = 0 if axis is None else local_start(logits.shape[-1])
    best = row_max(all_gather(row_max(logits)[..., None], axis))
    total = all_gather(row_sum(jnp.exp(logits - best[..., None]))[..., None], axis)
    norm = best + row_log(sum_in_order(total)[..., 0])
    place = tokens - first
    is_here = (place >= 0) & (place < logits.shape[-1])
    own = jnp.take_along_axis(
        logits, jnp.where(is_here, place, 0)[..., None], axis=-1, mode="promise_in_bounds"
    )
    own = row_max(all_gather(jnp.where(is_here[..., None], own, -jnp.inf), axis))
    if report < Logprobs.TOP:
        none = jnp.zeros((*tokens.shape, 0))
        return TokenLogprobs(own - norm, none.astype(jnp.int32), none)
    values, ids = largest(logits, MAX_LOGPROBS)
    if axis is not None:
        ids = all_gather(ids + first, axis)
        values, places = jax.lax.top_k(all_gather(values, axis), min(MAX_LOGPROBS, ids.shape[-1]))
        ids = jnp.take_along_axis(ids, places, axis=-1, mode="promise_in_bounds")
    return TokenLogprobs(own - norm, ids, values - norm[..., None])


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of x f32[..., V] along V, in descending order, and their indices i32; at most V.

    XLA sorts whole rows if more than 16 values are wanted. The largest values lie in the groups with the
    largest maxima, so that it is enough to sort these maxima, and then what is in these groups.
    """
    size = x.shape[-1]
    count = min(count, size)
    if size <= 2 * count * _GROUP:
        return jax.lax.top_k(x, count)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % _GROUP)], constant_values=-jnp.inf)
    groups = padded.reshape(*x.shape[:-1], -1, _GROUP)
    # In the order of their places, so that the first of equal values comes first.
    chosen = jnp.sort(jax.lax.top_k(groups.max(axis=-1), count)[1], axis=-1)
    within = jnp.take_along_axis(groups, chosen[..., None], axis=-2, mode="promise_in_bounds")
    values, places = jax.lax.top_k(within.reshape(*x.shape[:-1], -1), count)
    group = jnp.take_along_axis(chosen, places // _GROUP, axis=-1, mode="promise_in_bounds")
    return values, (group * _GROUP + places % _GROUP).astype(jnp.int32)
