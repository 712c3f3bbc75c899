"""Random numbers that depend only on (request seed, position, purpose), never on the batch.

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011). It is written in plain 32-bit integer operations, so that a GPU kernel can compute the same bits.
"""

from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
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


@partial(jax.jit, inline=True)  # traced once for each shape, not in each of a program's draws
def threefry2x32(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypts the counter (x0, x1) with the key (k0, k1) to two random words; all u32 of one shape."""
    k0, k1, x0, x1 = (jnp.asarray(word, jnp.uint32) for word in (k0, k1, x0, x1))
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


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
    counter = position.astype(jnp.uint32)
    keys = jnp.stack(threefry2x32(words[..., 0], words[..., 1], counter, jnp.uint32(purpose)), axis=-1)
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
    counter = jnp.arange((n + 1) // 2, dtype=jnp.uint32)
    if first is not None:
        counter += first.astype(jnp.uint32) >> 1
    words = threefry2x32(keys[..., :1], keys[..., 1:], counter, jnp.uint32(0))
    pairs = jnp.stack(words, axis=-1)  # [..., n/2, 2]; with no rows (K = 0) a -1 below would be ambiguous
    return pairs.reshape(*keys.shape[:-1], 2 * counter.size)[..., :n]


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
