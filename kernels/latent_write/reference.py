"""The write of latents in pure JAX."""

import jax
import jax.numpy as jnp


def latent_write(cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes one vector per slot; in place if the cache is donated.

    If several rows have the same slot, which is allowed only in page 0, any of them may remain.

    Args:
      cache: [pages, 1, 1, P, D].
      slots: i32[B, Q] from `slot_mapping`; must lie in the cache.
      rows: [B, Q, D].

    Returns:
      The cache, same shape and dtype.
    """
    if slots.size == 1:
        # See `rope_kv_write.reference`: XLA on a CPU would copy the cache.
        slots, rows = (jnp.concatenate([x, x], axis=1) for x in (slots, rows))
    page, offset = jnp.divmod(slots, cache.shape[3])
    rows = rows.astype(cache.dtype)
    return cache.at[page, 0, 0, offset].set(rows, mode="promise_in_bounds", unique_indices=False)
