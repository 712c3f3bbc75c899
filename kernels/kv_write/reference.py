"""The cache write in pure JAX."""

import jax
import jax.numpy as jnp


def kv_write(cache: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Writes one key and one value row per slot; in place when the cache is donated.

    Where several rows name one slot (of page 0, by contract), any of them may stay.

    Args:
      cache: [pages, 2N, P, D], key heads first, then value heads.
      slots: i32[B, Q] from `slot_mapping`; must lie in the cache.
      keys: [B, Q, N, D].
      values: [B, Q, N, D].

    Returns:
      The cache, same shape and dtype.
    """
    page, offset = jnp.divmod(slots, cache.shape[2])
    rows = jnp.concatenate([keys, values], axis=2).astype(cache.dtype)
    return cache.at[page, :, offset].set(rows, mode="promise_in_bounds", unique_indices=False)
