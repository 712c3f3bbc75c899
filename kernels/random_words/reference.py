"""Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), in
pure JAX. It is written in plain 32-bit integer operations, so that kernels can compute the same bits.
"""

from functools import partial

import jax
import jax.numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def random_words(keys: jax.Array, counters: jax.Array, *, pairs: int) -> jax.Array:
    """Pairs of random words: pair j of row n is threefry(keys[n], counters[n] + (j, 0)).

    Args:
      keys: u32[N, 2].
      counters: u32[N, 2], the first pair's.
      pairs: J, the number of pairs in a row.

    Returns:
      u32[N, J, 2].
    """
    first = counters[:, :1] + jnp.arange(pairs, dtype=jnp.uint32)
    return jnp.stack(threefry2x32(keys[:, :1], keys[:, 1:], first, counters[:, 1:]), axis=-1)


@partial(jax.jit, inline=True)  # traced once for each shape, not in each of a program's draws
def threefry2x32(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypts the counter (x0, x1) with the key (k0, k1) to two random words; all u32 of one shape."""
    k0, k1, x0, x1 = (jnp.asarray(word, jnp.uint32) for word in (k0, k1, x0, x1))
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
