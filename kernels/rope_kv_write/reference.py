"""Rotation and cache write in pure JAX."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache, encode


def rope_kv_write(
    cache: Cache, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[Cache, jax.Array]:
    """Rotates queries and keys by their positions, and writes one key and one value row per slot.

    If several rows have the same slot, which is allowed only in page 0, any of them may remain.

    Rotates in float32 and in the NeoX order: element i is paired with element i + D/2.

    Args:
      cache: [pages, H, 2, P, D]; axis 2 holds keys, then values. It is updated in place if it is donated. In
        a `CodedCache`, rows are rounded by `encode`.
      slots: i32[B, Q] from `slot_mapping`; must lie in the cache.
      projected: [B, Q, H, G + 2, D]: for every key/value head its queries, its key, its value.
      cos, sin: f32[B, Q, D/2] of every row's position.

    Returns:
      The cache, and the rotated queries [B, Q, H, G, D] in the dtype of `projected`.
    """
    queries, keys, values = projected[..., :-2, :], projected[..., -2:-1, :], projected[..., -1, :]
    queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)[..., 0, :]
    return _write(cache, slots, keys, values), queries


def _write(cache: Cache, slots: jax.Array, keys: jax.Array, values: jax.Array) -> Cache:
    """The cache with keys and values [B, Q, H, D] in the slots."""
    if slots.size == 1:
        # On a CPU, XLA fuses the write of a single row into the following gather and, to keep the old cache,
        # copies all of it. It does not do so for a scatter of two rows, even equal ones.
        slots, keys, values = (jnp.concatenate([x, x], axis=1) for x in (slots, keys, values))
    page, offset = jnp.divmod(slots, cache.shape[3])
    rows = jnp.stack([keys, values], axis=3)  # [B, Q, H, 2, D]

    def put(into: jax.Array, rows: jax.Array) -> jax.Array:
        return into.at[page, :, :, offset].set(rows, mode="promise_in_bounds", unique_indices=False)

    if isinstance(cache, CodedCache):
        codes, exponents = encode(rows)
        return CodedCache(put(cache.codes, codes), put(cache.exponents, exponents))
    return put(cache, rows.astype(cache.dtype))


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos[:, :, None, None, :], sin[:, :, None, None, :]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)
