"""Sparse attention, over listed slots in pure JAX: one softmax over two lists and a sink."""

import jax
import jax.numpy as jnp
from jax import lax

# Slots per block; see `paged_attention.reference`.
BLOCK = 128


def sparse_attention(
    queries: jax.Array,
    cache: jax.Array,
    window_slots: jax.Array,
    window_lengths: jax.Array,
    entries: jax.Array | None,
    entry_slots: jax.Array,
    num_entries: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Softmax attention of every query row over the slots that it lists, in a cache and in one of entries.

    All heads share one vector per slot, which is key and value. The work follows the longest list of the
    batch, not the lists' width, because the loop over blocks of slots has a traced trip count.

    Args:
      queries: [B, Q, H, D].
      cache: [pages, 1, 1, P, D].
      window_slots: i32[B, Q, W], page * P + offset in `cache`; arbitrary valid slots past a row's length.
      window_lengths: i32[B, Q], how many of `window_slots` a row sees.
      entries: [pages, 1, 1, E, D], a cache with E entries per page; None if there are no entries.
      entry_slots: i32[B, Q, N], page * E + offset in `entries`; or i32[B, 1, N], one list for all rows.
      num_entries: i32[B, Q], how many of `entry_slots` a row sees.
      sinks: f32[H], one more logit per head in the softmax, without a value and not multiplied by `scale`.
      scale: factor of the dot products.

    Returns:
      [B, Q, H, D] in the dtype of `queries`; zeros for a row that sees nothing. Slots that a row does not
      see have no effect, even if they hold NaN.

    Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`.
    """
    if not queries.size:
        return queries
    rows = queries.astype(jnp.float32) * scale
    # A sink acts like a key, without a value, that every row has seen before the first block.
    peak = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*rows.shape[:-1], 1))
    carry = (peak, jnp.ones_like(peak), jnp.zeros_like(rows))
    carry = _absorb_list(carry, rows, cache, window_slots, window_lengths)
    if entries is not None:
        carry = _absorb_list(carry, rows, entries, entry_slots, num_entries)
    _, total, output = carry
    return (output / total).astype(queries.dtype)


Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Largest score and sum of weights (f32[B, Q, H, 1] each) and weighted values (f32[B, Q, H, D]) so far."""


def _absorb_list(
    carry: Carry, rows: jax.Array, cache: jax.Array, slots: jax.Array, lengths: jax.Array
) -> Carry:
    width = slots.shape[2]
    block = min(BLOCK, width)
    if not block:
        return carry
    slots = jnp.pad(slots, ((0, 0), (0, 0), (0, -width % block)))

    def body(i: jax.Array, carry: Carry) -> Carry:
        page, offset = jnp.divmod(lax.dynamic_slice_in_dim(slots, i * block, block, axis=2), cache.shape[3])
        index = i * block + jnp.arange(block, dtype=jnp.int32)
        return _absorb(carry, rows, cache[page, 0, 0, offset], index < lengths[..., None])

    return lax.fori_loop(0, -(-lengths.max() // block), body, carry)


def _absorb(carry: Carry, rows: jax.Array, vectors: jax.Array, seen: jax.Array) -> Carry:
    """One step of an online softmax over vectors [B, Q or 1, S, D], where `seen`, bool[B, Q, S]."""
    peak, total, output = carry
    # Zero times NaN is NaN, so vectors that no row sees are replaced before they get a weight of zero.
    read = seen if vectors.shape[1] == seen.shape[1] else seen.any(axis=1, keepdims=True)
    vectors = jnp.where(read[..., None], vectors.astype(jnp.float32), 0.0)
    vectors = jnp.broadcast_to(vectors, (*seen.shape, vectors.shape[-1]))
    scores = jnp.einsum("bqhd,bqsd->bqhs", rows, vectors, precision="highest")
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - new_peak), jnp.exp(peak - new_peak)
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    output = output * shrink + jnp.einsum("bqhs,bqsd->bqhd", weights, vectors, precision="highest")
    return new_peak, total, output
