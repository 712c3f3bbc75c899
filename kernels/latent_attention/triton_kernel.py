"""Latent attention in Triton, split over the context."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.context_splits import (
    absorb_scores,
    merge_kernel,
    num_splits,
    split_bounds,
)
from jaxspec_kernels.calls.triton_call import triton_call


def latent_attention(
    queries: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """See `reference.latent_attention`.

    The heads and rows of a slot share a tile of keys, which is loaded once and used for scores and values.
    The context is split as in `paged_attention`, and the same second kernel merges the splits.
    """
    batch, num_rows, heads, size = queries.shape
    page_size, width = cache.shape[3], page_table.shape[1]
    result = jax.ShapeDtypeStruct((batch, num_rows, heads, value_dim), queries.dtype)
    if queries.size == 0:
        return jnp.zeros(result.shape, result.dtype)
    rows = num_rows * heads
    wide = queries.dtype == jnp.float32
    block_rows = 16 if wide else min(max(triton.next_power_of_2(rows), 16), 64)
    block_keys = 16 if wide else 32
    tiles = triton.cdiv(rows, block_rows)
    splits = num_splits(batch * tiles, width * page_size, block_keys, programs=512)
    shape = (batch, 1, splits, rows)
    partial = [
        jax.ShapeDtypeStruct((*shape, value_dim), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    parts = triton_call(
        _split_kernel,
        (queries, cache, page_table, first, last),
        # A single split writes the result directly; the kernel takes the same number of pointers.
        [result, *(jax.ShapeDtypeStruct((1,), jnp.float32) for _ in range(2))] if splits == 1 else partial,
        grid=(batch, tiles, splits),
        # The accumulator, rows by value_dim in float32, fills the registers.
        num_warps=4 if block_rows <= 16 else 8,
        num_stages=2,
        num_rows=num_rows,
        heads=heads,
        value_dim=value_dim,
        size=size,
        page_size=page_size,
        width=width,
        splits=splits,
        # In powers of two, which the GPU computes faster.
        scale=scale * math.log2(math.e),
        block_rows=block_rows,
        block_keys=block_keys,
        block_value=max(triton.next_power_of_2(value_dim), 16),
        block_rope=max(triton.next_power_of_2(size - value_dim), 16),
    )
    if splits == 1:
        return parts[0]
    block_dim = max(triton.next_power_of_2(value_dim), 16)
    (merged,) = triton_call(
        merge_kernel,
        parts,
        [result],
        grid=(batch, rows),
        num_warps=1 if splits * block_dim <= 1024 else 8,
        num_rows=num_rows,
        heads=1,
        group=heads,
        head_dim=value_dim,
        splits=splits,
        block_splits=triton.next_power_of_2(splits),
        block_dim=block_dim,
    )
    return merged


@triton.jit
def _split_kernel(
    queries,
    cache,
    page_table,
    first,
    last,
    outputs,
    peaks,
    totals,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    size: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_value: tl.constexpr,
    block_rope: tl.constexpr,
):
    slot = tl.program_id(0)
    split = tl.program_id(2)
    rows: tl.constexpr = num_rows * heads

    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    in_rows = row < rows
    query_row = slot * num_rows + row // heads
    row_first = tl.load(first + query_row, mask=in_rows, other=0)
    row_last = tl.load(last + query_row, mask=in_rows, other=-1)
    begin, end = split_bounds(row_first, row_last, width * page_size, split, splits, block_keys)

    # The vector is loaded in two parts: as a whole it would be padded to the next power of two.
    value_at = tl.arange(0, block_value)[None, :]
    rope_at = value_dim + tl.arange(0, block_rope)[None, :]
    in_value, in_rope = value_at < value_dim, rope_at < size
    query_at = slot * rows + row[:, None]
    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    output = tl.zeros((block_rows, block_value), tl.float32)
    if begin < end:
        query_value = tl.load(
            queries + query_at * size + value_at, mask=in_rows[:, None] & in_value, other=0.0
        )
        query_rope = tl.load(queries + query_at * size + rope_at, mask=in_rows[:, None] & in_rope, other=0.0)
        dtype = query_value.dtype
        for start in range(begin, end, block_keys):
            position = start + tl.arange(0, block_keys)
            used = position < end
            page = tl.load(page_table + slot * width + position // page_size, mask=used, other=0)
            # 64 bits, because a cache may have more than 2^31 elements.
            key_at = (page.to(tl.int64) * page_size + position % page_size)[:, None] * size
            in_context = used[:, None]
            key_value = tl.load(cache + key_at + value_at, mask=in_context & in_value, other=0.0).to(dtype)
            key_rope = tl.load(cache + key_at + rope_at, mask=in_context & in_rope, other=0.0).to(dtype)
            scores = tl.dot(query_rope, tl.trans(key_rope), input_precision="ieee")
            scores = tl.dot(query_value, tl.trans(key_value), scores, input_precision="ieee") * scale
            visible = (position[None, :] >= row_first[:, None]) & (position[None, :] <= row_last[:, None])
            scores = tl.where(visible & used[None, :], scores, float("-inf"))
            weights, peak, total, shrink = absorb_scores(scores, peak, total)
            output = tl.dot(weights.to(dtype), key_value, output * shrink[:, None], input_precision="ieee")

    mask = in_rows[:, None] & in_value
    if splits == 1:
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        at = query_at * value_dim + value_at
        tl.store(outputs + at, output.to(outputs.dtype.element_ty), mask=mask)
    else:
        part_row = (slot * splits + split) * rows + row
        tl.store(peaks + part_row, peak, mask=in_rows)
        tl.store(totals + part_row, total, mask=in_rows)
        if begin < end:
            tl.store(outputs + part_row[:, None] * value_dim + value_at, output, mask=mask)
