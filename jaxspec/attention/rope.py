"""Rotary position embedding, halves rotated against each other (the NeoX order)."""

import jax
import jax.numpy as jnp

RopeTables = tuple[jax.Array, jax.Array]
"""Cosine and sine of every row's position, f32[N, D/2] each."""


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates x [N, heads..., D]; computed in float32."""
    cos, sin = (jnp.expand_dims(t, tuple(range(1, x.ndim - 1))) for t in tables)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


def pairs_to_halves(x: jax.Array) -> jax.Array:
    """x [..., D], whose neighbours are to be rotated against each other, in the order of `apply_rope`.

    Done to queries and keys alike: their products stay the same.
    """
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
