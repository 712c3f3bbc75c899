"""Random numbers that depend only on (request seed, position, purpose), never on the batch.

A counter-based generator, Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011), is written out here as plain 32-bit integer operations, so that a GPU
kernel can repeat the formula and agree with the reference on every bit.
"""

from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
MAX_DRAFTS = 1024
"""Drafts that a step may have."""


class Purpose(IntEnum):
    """What a draw is for. Each has a stream of its own: if two shared one, sampling would be biased.

    A token sampled without a proposal (in plain decoding, or after a prompt) is a bonus token.
    """

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3


@partial(jax.jit, inline=True)  # traced once for each shape, not in each of a program's draws
def threefry2x32(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypts the counter (x0, x1) under the key (k0, k1): two random words, all uint32 of one shape."""
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
      position: i32[B, ...], position of the row whose logits are sampled from; of a draft, `draft_position`.
      purpose: one for all rows, or an array that broadcasts against `position`.

    Returns:
      u32[B, ..., 2].
    """
    words = seed.reshape(seed.shape[:1] + (1,) * (position.ndim - 1) + (2,))
    counter = position.astype(jnp.uint32)
    keys = jnp.stack(threefry2x32(words[..., 0], words[..., 1], counter, jnp.uint32(purpose)), axis=-1)
    # Fused with the draw from it, one Threefry in another, XLA:CPU of jaxlib 0.11 and 0.12 compiles for
    # minutes (K = 3, 3 slots).
    return lax.optimization_barrier(keys)


def draft_position(start: jax.Array, draft: jax.Array | int) -> jax.Array:
    """What stands for a position in the key of a draft: one number for every draft of every step.

    Drafts past the accepted ones have had a say in how many those are, so the next step, whose drafts are at
    the same positions, may not draw with their noise.

    Args:
      start: i32[...], position of the step's first row, below 2^22.
      draft: the draft's number in the step, from 0, below `MAX_DRAFTS`.
    """
    return start * MAX_DRAFTS + draft


def bits(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Random words u32[..., n] of keys u32[..., 2]: index v is word `v & 1` of threefry(key, (v >> 1, 0)).

    Args:
      first: i32[], even, the index of the first word; None for 0.
    """
    counter = jnp.arange((n + 1) // 2, dtype=jnp.uint32)
    if first is not None:
        counter += first.astype(jnp.uint32) >> 1
    words = threefry2x32(keys[..., :1], keys[..., 1:], counter, jnp.uint32(0))
    pairs = jnp.stack(words, axis=-1)  # [..., n/2, 2]; keys may have no rows (K = 0), so no -1 below
    return pairs.reshape(*keys.shape[:-1], 2 * counter.size)[..., :n]


def uniform(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Draws f32[..., n] from the open interval (0, 1): (bits + 0.5) / 2^32, below 1; `first`: see `bits`."""
    draw = (bits(keys, n, first).astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.minimum(draw, 1.0 - 2.0**-24)


def gumbel(keys: jax.Array, n: int, first: jax.Array | None = None) -> jax.Array:
    """Standard Gumbel noise f32[..., n], for sampling by argmax(logits + noise); `first` as for `bits`.

    Large noise comes from u near 0, where float32 is dense, so it reaches 33 log 2 = 22.9. The usual
    -log(-log(u)) takes it from u near 1, stops near 16.6, and never draws a rare token.
    """
    return -jnp.log(-jnp.log1p(-uniform(keys, n, first)))
