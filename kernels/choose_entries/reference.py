"""The choice of entries in pure JAX: scores of all entries, and the slots of the best."""

import jax
import jax.numpy as jnp
from jax import lax

# Entries per block; see `paged_attention.reference`.
BLOCK = 128


def choose_entries(
    queries: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    entry_slots: jax.Array,
    num_entries: jax.Array,
    *,
    keep: int,
) -> jax.Array:
    """The slots of the entries with the largest scores, of those that a row may see.

    The score of an entry is the sum over heads of weight * relu(query . key). Of entries with equal scores,
    the earlier ones are chosen.

    Args:
      queries: [B, Q, I, D] of I heads.
      weights: [B, Q, I], factors of the heads.
      keys: [pages, 1, 1, E, D], a cache with the keys of E entries per page.
      entry_slots: i32[B, N], page * E + offset of a slot's entries, the oldest first.
      num_entries: i32[B, Q], how many of them a row may see.
      keep: how many to choose, at most N.

    Returns:
      i32[B, Q, keep], in any order. A row with fewer entries has arbitrary ones behind them. Entries that a
      row may not see have no effect, even if they hold NaN.

    Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`.
    """
    batch, width = entry_slots.shape
    if not queries.size:
        return jnp.zeros((*queries.shape[:2], keep), jnp.int32)
    block = min(BLOCK, width)
    rows, factors = queries.astype(jnp.float32), weights.astype(jnp.float32)
    padded = jnp.pad(entry_slots, ((0, 0), (0, -width % block)))

    def body(i: jax.Array, scores: jax.Array) -> jax.Array:
        page, offset = jnp.divmod(lax.dynamic_slice_in_dim(padded, i * block, block, axis=1), keys.shape[3])
        read = keys[page, 0, 0, offset].astype(jnp.float32)  # [B, block, D]
        by_head = jax.nn.relu(jnp.einsum("bqid,bsd->bqis", rows, read, precision="highest"))
        each = jnp.einsum("bqi,bqis->bqs", factors, by_head, precision="highest")
        index = i * block + jnp.arange(block, dtype=jnp.int32)
        each = jnp.where(index < num_entries[..., None], each, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, each, i * block, axis=2)

    scores = jnp.full((batch, queries.shape[1], padded.shape[1]), -jnp.inf, jnp.float32)
    scores = lax.fori_loop(0, -(-num_entries.max() // block), body, scores)
    _, chosen = lax.top_k(scores, keep)
    return jnp.take_along_axis(padded[:, None], chosen, axis=2, mode="promise_in_bounds")
