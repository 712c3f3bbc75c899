"""The cache write in pure JAX."""

import jax
import jax.numpy as jnp


def kv_write(cache: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Writes one key and one value row per slot; in place when the cache is donated.

    Where several rows name one slot (of page 0, by contract), any of them may stay.

    Args:
      cache: [pages, N, 2, P, D]; axis 2 holds keys, then values.
      slots: i32[B, Q] from `slot_mapping`; must lie in the cache.
      keys: [B, Q, N, D].
      values: [B, Q, N, D].

    Returns:
      The cache, same shape and dtype.
    """
    if slots.size == 1:
        # XLA on a CPU fuses the write of a single row into the gather that follows, and then keeps the
        # cache from before the write: a copy of all of it. A scatter of two rows, be they the same, stays.
        slots, keys, values = (jnp.concatenate([x, x], axis=1) for x in (slots, keys, values))
    page, offset = jnp.divmod(slots, cache.shape[3])
    rows = jnp.stack([keys, values], axis=3).astype(cache.dtype)  # [B, Q, N, 2, D]
    return cache.at[page, :, :, offset].set(rows, mode="promise_in_bounds", unique_indices=False)
