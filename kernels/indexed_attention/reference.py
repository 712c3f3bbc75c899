"""Attention over listed slots and compressed entries in pure JAX: one softmax over both."""

import jax
import jax.numpy as jnp
from jax import lax

# Entries per block; see `paged_attention.reference`.
BLOCK_ENTRIES = 128


def indexed_attention(
    queries: jax.Array,
    cache: jax.Array,
    window_slots: jax.Array,
    window_lengths: jax.Array,
    entries: jax.Array | None,
    page_table: jax.Array,
    num_entries: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Softmax attention of every query row over the cache slots that it lists and its slot's first entries.

    The work is proportional to the longest context in the batch, not to the width of the page table, because
    the loop over blocks of entries has a traced trip count.

    Args:
      queries: [B, Q, H*G, D]. Query head i reads key/value head i // G.
      cache: [pages, H, 2, P, D]; axis 2 holds keys, then values.
      window_slots: i32[B, Q, W], page * P + offset in `cache`; arbitrary valid slots past a row's length.
      window_lengths: i32[B, Q], how many of `window_slots` a row sees.
      entries: [pages, H, 2, E, D], E entries per page; None if there are no compressed entries.
      page_table: i32[B, T], the page that holds entries i*E..i*E+E-1 of the slot.
      num_entries: i32[B, Q], how many of its slot's entries a row sees, from the first on.
      scale: factor of the dot products, normally D ** -0.5.

    Returns:
      [B, Q, H*G, D] in the dtype of `queries`; zeros for a row that sees nothing. Slots and entries that a
      row does not see have no effect, even if they hold NaN.

    Source: DeepSeek-V4 in vLLM 0.26, `models/deepseek_v4/sparse_mla.py`.
    """
    batch, num_rows, _, head_dim = queries.shape
    if not queries.size:
        return queries
    num_kv_heads, page_size = cache.shape[1], cache.shape[3]
    rows = queries.astype(jnp.float32) * scale
    rows = rows.reshape(batch, num_rows, num_kv_heads, -1, head_dim)  # [B, Q, H, G, D]

    page, offset = jnp.divmod(window_slots, page_size)
    listed = cache[page, :, :, offset]  # [B, Q, W, H, 2, D]
    seen = jnp.arange(window_slots.shape[2]) < window_lengths[..., None]
    carry = _absorb(_nothing(rows), rows, listed, seen)
    if entries is not None:
        carry = _absorb_entries(carry, rows, entries, page_table, num_entries)
    _, total, output = carry
    output = output / jnp.where(total == 0.0, 1.0, total)
    return output.reshape(queries.shape).astype(queries.dtype)


Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Largest score, sum of weights (f32[B, Q, H, G, 1]) and weighted values (f32[B, Q, H, G, D]) so far."""


def _nothing(rows: jax.Array) -> Carry:
    column = jnp.zeros((*rows.shape[:-1], 1), jnp.float32)
    return column - jnp.inf, column, jnp.zeros_like(rows)


def _absorb_entries(
    carry: Carry, rows: jax.Array, entries: jax.Array, page_table: jax.Array, num_entries: jax.Array
) -> Carry:
    per_page = entries.shape[3]
    pages_per_block = max(1, min(BLOCK_ENTRIES // per_page, page_table.shape[1]))
    block = pages_per_block * per_page
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))

    def body(i: jax.Array, carry: Carry) -> Carry:
        pages = lax.dynamic_slice_in_dim(page_table, i * pages_per_block, pages_per_block, axis=1)
        read = jnp.moveaxis(entries[pages], 4, 2)  # [B, pages, E, H, 2, D]
        read = read.reshape(len(pages), 1, block, *read.shape[3:])
        index = i * block + jnp.arange(block, dtype=jnp.int32)
        return _absorb(carry, rows, read, index < num_entries[..., None])

    return lax.fori_loop(0, -(-num_entries.max() // block), body, carry)


def _absorb(carry: Carry, rows: jax.Array, keys_values: jax.Array, seen: jax.Array) -> Carry:
    """One step of an online softmax.

    Args:
      keys_values: [B, Q, S, H, 2, D], or [B, 1, S, H, 2, D] if all rows of a slot share them.
      seen: bool[B, Q, S].
    """
    peak, total, output = carry
    # Zero times NaN is NaN, so values that no row sees are replaced before they get a weight of zero.
    read = seen if keys_values.shape[1] > 1 else seen.any(axis=1, keepdims=True)
    keys_values = jnp.where(read[..., None, None, None], keys_values.astype(jnp.float32), 0.0)
    keys_values = jnp.broadcast_to(keys_values, (*rows.shape[:2], *keys_values.shape[2:]))
    keys, values = keys_values[..., 0, :], keys_values[..., 1, :]
    scores = jnp.einsum("bqngd,bqsnd->bqngs", rows, keys, precision="highest")
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
    # The peak of a row that has seen nothing yet is -inf, and -inf - -inf is NaN.
    safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    weights, shrink = jnp.exp(scores - safe_peak), jnp.exp(peak - safe_peak)
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    output = output * shrink + jnp.einsum("bqngs,bqsnd->bqngd", weights, values, precision="highest")
    return new_peak, total, output
