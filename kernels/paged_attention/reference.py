"""Paged attention in pure JAX: an online softmax over blocks of pages."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache, decode

# Keys per block. On two CPU cores, blocks of 128 and of 512 keys were equally fast within 10 % at contexts of
# 400 and 1900. Gathering a whole table of 2048 keys took 16 ms instead of 2.5 ms at a context of 100.
BLOCK_KEYS = 128


def paged_attention(
    queries: jax.Array,
    cache: Cache,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of every query row over the positions first..last of its slot.

    The work is proportional to the longest context in the batch, not to the width of the page table, because
    the loop over blocks of pages has a traced trip count.

    Args:
      queries: [B, Q, H*G, D]. Query head i reads key/value head i // G.
      cache: [pages, H, 2, P, D]; axis 2 holds keys, then values. A `CodedCache` is read as it is.
      page_table: i32[B, T], the page that holds positions i*P..i*P+P-1 of the slot.
      first: i32[B, Q], the first position that a row sees.
      last: i32[B, Q], the last one, inclusive; less than `first` for a row that sees nothing.
      scale: factor of the dot products, normally D ** -0.5.
      sinks: f32[H*G] or None. One more logit per head in the softmax, without a value and not multiplied by
        `scale` (gpt-oss; G. Xiao et al., arXiv 2309.17453).

    Returns:
      [B, Q, H*G, D] in the dtype of `queries`; zeros for a row that sees nothing. Positions outside
      first..last have no effect, even if the cache holds NaN there.
    """
    return attend(
        queries, cache, page_table, first, last, value_dim=queries.shape[-1], scale=scale, sinks=sinks
    )


def attend(
    queries: jax.Array,
    cache: Cache,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`paged_attention`, also over a cache with one vector per position, [pages, H, 1, P, D].

    Values are then the first `value_dim` elements of the keys. Returns [B, Q, H*G, value_dim].
    """
    batch, num_rows, num_heads, head_dim = queries.shape
    if not queries.size:
        return jnp.zeros((batch, num_rows, num_heads, value_dim), queries.dtype)
    num_kv_heads, page_size = cache.shape[1], cache.shape[3]
    group = num_heads // num_kv_heads
    pages_per_block = max(1, min(BLOCK_KEYS // page_size, page_table.shape[1]))
    block = pages_per_block * page_size
    page_table = _pad_columns(page_table, pages_per_block)

    rows = (queries.astype(jnp.float32) * scale).reshape(batch, num_rows, num_kv_heads, group, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, group * num_rows, head_dim)
    first_row = jnp.tile(first, (1, group))[:, None, :, None]  # [B, 1, G*Q, 1]
    last_row = jnp.tile(last, (1, group))[:, None, :, None]
    # The range of each slot: values outside it are replaced by zero, since zero times NaN is NaN.
    slot_first = jnp.where(last < first, jnp.iinfo(jnp.int32).max, first).min(axis=1)
    slot_last = last.max(axis=1)

    def body(i, carry):
        peak, total, output = carry
        pages = lax.dynamic_slice_in_dim(page_table, i * pages_per_block, pages_per_block, axis=1)
        keys_values = _gather_pages(cache, pages)
        keys, values = keys_values[:, :, 0], keys_values[:, :, -1, :, :value_dim]
        position = i * block + jnp.arange(block, dtype=jnp.int32)
        used = (position >= slot_first[:, None]) & (position <= slot_last[:, None])
        values = jnp.where(used[:, None, :, None], values, 0.0)
        scores = jnp.einsum("bnrd,bnsd->bnrs", rows, keys, precision="highest")
        visible = (position >= first_row) & (position <= last_row)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        # The peak of a row that has seen nothing yet is -inf, and -inf - -inf is NaN.
        safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp(scores - safe_peak)
        shrink = jnp.exp(peak - safe_peak)
        total = total * shrink + weights.sum(axis=-1, keepdims=True)
        output = output * shrink + jnp.einsum("bnrs,bnsd->bnrd", weights, values, precision="highest")
        return new_peak, total, output

    shape = (batch, num_kv_heads, group * num_rows, 1)
    if sinks is None:
        peak, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        # A sink acts like a key, without a value, that every row has seen before the first block.
        per_row = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), num_rows, axis=1)
        peak, total = jnp.broadcast_to(per_row[None, :, :, None], shape), jnp.ones(shape, jnp.float32)
    start = (peak, total, jnp.zeros((*shape[:-1], value_dim), jnp.float32))
    begin = jnp.maximum(slot_first.min(), 0) // block
    end = jnp.clip(slot_last.max() // block + 1, 0, page_table.shape[1] // pages_per_block)
    _, total, output = lax.fori_loop(begin, end, body, start)
    output = output / jnp.where(total == 0.0, 1.0, total)
    output = output.reshape(batch, num_kv_heads, group, num_rows, value_dim).transpose(0, 3, 1, 2, 4)
    return output.reshape(*queries.shape[:-1], value_dim).astype(queries.dtype)


def _pad_columns(page_table: jax.Array, multiple: int) -> jax.Array:
    missing = -page_table.shape[1] % multiple
    return jnp.pad(page_table, ((0, 0), (0, missing)))


def _gather_pages(cache: Cache, pages: jax.Array) -> jax.Array:
    """Reads i32[B, W] pages as f32[B, H, 2 (or 1), W*P, D], without a transpose after the gather."""

    def gather(cache: jax.Array) -> jax.Array:
        others = tuple(range(4, cache.ndim + 1))
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(1, 2, *others), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
        gathered = lax.gather(
            cache, pages[..., None], dimensions, (1, *cache.shape[1:]), mode=lax.GatherScatterMode.CLIP
        )
        batch, heads, planes, width, page_size, *rest = gathered.shape
        return gathered.reshape(batch, heads, planes, width * page_size, *rest)

    if isinstance(cache, CodedCache):
        return decode(gather(cache.codes), gather(cache.exponents))
    return gather(cache).astype(jnp.float32)
