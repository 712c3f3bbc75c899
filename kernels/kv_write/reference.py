"""The cache write in pure JAX."""

import jax
import jax.numpy as jnp


def kv_write(cache: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Writes one key and one value row per slot; in place if the cache is donated.

    If several rows have the same slot, which is allowed only in page 0, any of them may remain.

    Args:
      cache: [pages, H, 2, P, D]; axis 2 holds keys, then values.
      slots: i32[B, Q] from `slot_mapping`; must lie in the cache.
      keys: [B, Q, H, D].
      values: [B, Q, H, D].

    Returns:
      The cache, same shape and dtype.
    """
    if slots.size == 1:
        # On a CPU, XLA fuses the write of a single row into the following gather and, to keep the old cache,
        # copies all of it. It does not do so for a scatter of two rows, even equal ones.
        slots, keys, values = (jnp.concatenate([x, x], axis=1) for x in (slots, keys, values))
    page, offset = jnp.divmod(slots, cache.shape[3])
    rows = jnp.stack([keys, values], axis=3).astype(cache.dtype)  # [B, Q, H, 2, D]
    return cache.at[page, :, :, offset].set(rows, mode="promise_in_bounds", unique_indices=False)
