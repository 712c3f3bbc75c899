"""Sparse attention, over listed slots in Triton, split over the lists."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.context_splits import absorb_scores, merge_kernel, num_splits
from jaxspec_kernels.calls.triton_call import triton_call

_LEAST_KEYS = 64
"""The least number of slots in a split: the partial result of a row and split is as large as 128 vectors."""


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
    """See `reference.sparse_attention`.

    A tile is the heads of one row: rows list slots of their own, so only heads can share what is loaded. Each
    vector is loaded once and used for scores and values. Both lists count as one, which is cut into a static
    number of splits, so that a few rows fill the GPU. `merge_kernel` merges the splits.
    """
    batch, num_rows, heads, size = queries.shape
    if queries.size == 0:
        return queries
    rows, width = batch * num_rows, window_slots.shape[2]
    most = 0 if entries is None else entry_slots.shape[2]
    wide = queries.dtype == jnp.float32
    block_heads = 16 if wide else min(max(triton.next_power_of_2(heads), 16), 64)
    block_dim = max(triton.next_power_of_2(size), 16)
    tiles = triton.cdiv(heads, block_heads)
    # The accumulator of 64 heads of 512 in float32 takes half of a multiprocessor's registers, so that one
    # such tile runs on each.
    splits = num_splits(rows * tiles, width + most, _LEAST_KEYS, programs=8192 // block_heads)
    shape = (rows, splits, heads)
    partial = [
        jax.ShapeDtypeStruct((*shape, size), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    whole = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    parts = triton_call(
        _split_kernel,
        # Without entries, their pointers are never read.
        (
            queries,
            cache,
            window_slots,
            window_lengths,
            *((entries, entry_slots, num_entries) if entries is not None and most else (cache, *[sinks] * 2)),
            sinks,
        ),
        # A single split writes the result directly; the kernel takes the same number of pointers.
        [whole, *(jax.ShapeDtypeStruct((1,), jnp.float32) for _ in range(2))] if splits == 1 else partial,
        grid=(rows * tiles, splits),
        num_warps=4 if block_heads <= 16 else 8,
        num_stages=2,
        num_rows=num_rows,
        heads=heads,
        size=size,
        width=width,
        most=most,
        is_shared=entry_slots.shape[1] != num_rows,
        tiles=tiles,
        splits=splits,
        # In powers of two, which the GPU computes faster.
        scale=scale * math.log2(math.e),
        block_heads=block_heads,
        block_keys=16 if wide else 32,
        block_dim=block_dim,
    )
    if splits == 1:
        return parts[0]
    (merged,) = triton_call(
        merge_kernel,
        parts,
        [whole],
        grid=(rows, heads),
        num_warps=1 if splits * block_dim <= 1024 else 4,
        num_rows=1,
        heads=1,
        group=heads,
        head_dim=size,
        splits=splits,
        block_splits=triton.next_power_of_2(splits),
        block_dim=block_dim,
    )
    return merged


@triton.jit
def _absorb_list(
    query,
    peak,
    total,
    output,
    cache,
    slots,
    begin,
    end,
    size: tl.constexpr,
    scale: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    """An online softmax over the vectors in slots[begin:end]."""
    dim = tl.arange(0, block_dim)[None, :]
    for start in range(begin, end, block_keys):
        index = start + tl.arange(0, block_keys)
        used = index < end
        # 64 bits, because a cache may have more than 2^31 elements. A slot is the index of a cache's row.
        slot = tl.load(slots + index, mask=used, other=0).to(tl.int64)
        mask = used[:, None] & (dim < size)
        vectors = tl.load(cache + slot[:, None] * size + dim, mask=mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(vectors), input_precision="ieee") * scale
        scores = tl.where(used[None, :], scores, float("-inf"))
        weights, peak, total, shrink = absorb_scores(scores, peak, total)
        output = tl.dot(weights.to(query.dtype), vectors, output * shrink[:, None], input_precision="ieee")
    return peak, total, output


@triton.jit
def _split_kernel(
    queries,
    cache,
    window_slots,
    window_lengths,
    entries,
    entry_slots,
    num_entries,
    sinks,
    outputs,
    peaks,
    totals,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    is_shared: tl.constexpr,
    tiles: tl.constexpr,
    splits: tl.constexpr,
    scale: tl.constexpr,
    block_heads: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    # 64 bits: the partial results of many rows, or their lists, may be more than 2^31 numbers.
    row = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1)
    head = (tl.program_id(0) % tiles) * block_heads + tl.arange(0, block_heads)
    in_heads = head < heads
    window = tl.load(window_lengths + row)
    seen = window
    if most:
        seen += tl.load(num_entries + row)
    length = tl.cdiv(tl.cdiv(seen, splits), block_keys) * block_keys
    begin = split * length
    end = tl.minimum(begin + length, seen)

    # A sink is a key, without a value, that every row has seen before the first split.
    is_first = split == 0
    sink = tl.load(sinks + head, mask=in_heads, other=0.0).to(tl.float32) * 1.4426950408889634
    peak = tl.where(is_first, sink, float("-inf"))
    total = tl.zeros((block_heads,), tl.float32) + tl.where(is_first, 1.0, 0.0)
    output = tl.zeros((block_heads, block_dim), tl.float32)
    dim = tl.arange(0, block_dim)[None, :]
    at = head[:, None] * size + dim
    mask = in_heads[:, None] & (dim < size)
    if begin < end:
        query = tl.load(queries + row * heads * size + at, mask=mask, other=0.0)
        peak, total, output = _absorb_list(
            query,
            peak,
            total,
            output,
            cache,
            window_slots + row * width,
            begin,
            tl.minimum(end, window),
            size,
            scale,
            block_keys,
            block_dim,
        )
        if most:
            peak, total, output = _absorb_list(
                query,
                peak,
                total,
                output,
                entries,
                entry_slots + (row // num_rows if is_shared else row) * most,
                tl.maximum(begin, window) - window,
                end - window,
                size,
                scale,
                block_keys,
                block_dim,
            )
    if splits == 1:
        output = output / total[:, None]
        tl.store(outputs + row * heads * size + at, output.to(outputs.dtype.element_ty), mask=mask)
    else:
        part = (row * splits + split) * heads
        tl.store(peaks + part + head, peak, mask=in_heads)
        tl.store(totals + part + head, total, mask=in_heads)
        if is_first | (begin < end):
            tl.store(outputs + part * size + at, output, mask=mask)
