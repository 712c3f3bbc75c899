"""Random numbers that depend only on (request seed, position, purpose), never on the batch.

The generator is Threefry-2x32 with 20 rounds (`random_words`).
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.random_words import random_words

MAX_DRAFTS = 1024
"""The most drafts of a step."""


class Purpose(IntEnum):
    """What a draw is for. Each purpose has its own random stream; sharing one would bias sampling.

    Tokens that are sampled without a proposal (in plain decoding, or after a prompt) use `BONUS`.
    """

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3


def row_keys(seed: jax.Array, position: jax.Array, purpose: Purpose | jax.Array) -> jax.Array:
    """The key of every row: threefry(seed, (position, purpose)).

    Args:
      seed: u32[B, 2], one per request.
      position: i32[B, ...], position of the row whose logits are sampled from; for drafts, `draft_position`.
      purpose: one for all rows, or an array that broadcasts against `position`.

    Returns:
      u32[B, ..., 2].
    """
    words = seed.reshape(seed.shape[:1] + (1,) * (position.ndim - 1) + (2,))
    purposes = jnp.broadcast_to(jnp.asarray(purpose, jnp.uint32), position.shape)
    counters = jnp.stack([position.astype(jnp.uint32), purposes], axis=-1)
    words = jnp.broadcast_to(words, counters.shape)
    keys = random_words(words.reshape(-1, 2), counters.reshape(-1, 2), pairs=1).reshape(counters.shape)
    # Without the barrier XLA:CPU fuses this Threefry with the next one, and jaxlib 0.11 and 0.12 compile for
    # minutes (K = 3, 3 slots).
    return lax.optimization_barrier(keys)


def draft_position(start: jax.Array, draft: jax.Array | int) -> jax.Array:
    """The number that replaces the position in a draft's key: different for every draft of every step.

    Rejected drafts have influenced how many drafts were accepted. The next step drafts at the same positions
    and must not reuse their noise.

    Args:
      start: i32[...], position of the step's first row, below 2^22.
      draft: the draft's index in the step, below `MAX_DRAFTS`.
    """
    return start * MAX_DRAFTS + draft


def bits(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Random words u32[..., n] from keys u32[..., 2]: word v is word `v & 1` of threefry(key, (v >> 1, 0)).

    Args:
      first: i32[], even, the index of the first word; None for 0.
    """
    start = jnp.uint32(0) if first is None else first.astype(jnp.uint32) >> 1
    counters = jnp.stack([jnp.broadcast_to(start, keys.shape[:-1]), jnp.zeros_like(keys[..., 0])], axis=-1)
    words = random_words(keys.reshape(-1, 2), counters.reshape(-1, 2), pairs=(n + 1) // 2)
    return words.reshape(*keys.shape[:-1], (n + 1) // 2 * 2)[..., :n]


def uniform(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Draws f32[..., n] from the open interval (0, 1): (bits + 0.5) / 2^32, kept below 1.

    Args:
      keys, n, first: as in `bits`.
    """
    draw = (bits(keys, n, first).astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.minimum(draw, 1.0 - 2.0**-24)


def gumbel(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Standard Gumbel noise f32[..., n], for sampling by argmax(logits + noise).

    Here large noise comes from u near 0, where float32 is dense, so noise reaches 33 log 2 = 22.9. The usual
    formula -log(-log(u)) gets it from u near 1 and ends near 16.6, which would never draw rare tokens.

    Args:
      keys, n, first: as in `bits`.
    """
    return -jnp.log(-jnp.log1p(-uniform(keys, n, first)))
