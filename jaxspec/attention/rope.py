"""Rotary position embedding in the NeoX order: element i is paired with element i + D/2."""

import jax
import jax.numpy as jnp

RopeTables = tuple[jax.Array, jax.Array]
"""Cosine and sine of every row's rotation angles, f32[N, D/2] each."""


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates x [N, heads..., D]; computes in float32 and returns the dtype of x."""
    cos, sin = (jnp.expand_dims(t, tuple(range(1, x.ndim - 1))) for t in tables)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


def within_to_halves(x: jax.Array, rotated: int) -> jax.Array:
    """Reorders x [..., D], of which only the first `rotated` entries are, from pairs (i, i + rotated/2) to
    those of `apply_rope`.

    Applied to queries and keys alike, it leaves their dot products unchanged.
    """
    first, rest = x[..., :rotated], x[..., rotated:]
    halves = (jnp.split(part, 2, axis=-1) for part in (first, rest))
    return jnp.concatenate([part for both in zip(*halves, strict=True) for part in both], axis=-1)


def pairs_to_halves(x: jax.Array) -> jax.Array:
    """Reorders x [..., D] from interleaved pairs (2i, 2i + 1) to the pairs of `apply_rope`.

    Applied to queries and keys alike, it leaves their dot products unchanged.
    """
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)


def halves_to_pairs(x: jax.Array) -> jax.Array:
    """The inverse of `pairs_to_halves`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], 2, -1), -1, -2).reshape(x.shape)
