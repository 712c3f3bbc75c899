"""Paged attention in Triton, split over the context."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache
from jaxspec_kernels.attention_parts.context_splits import (
    absorb_scores,
    load_pairs,
    load_scales,
    merge_kernel,
    num_splits,
    split_bounds,
)
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.paged_attention import mosaic_kernel, triton_exact

_LONGEST_WHOLE = 8192
"""The longest context that one program reads alone where two or three could share it."""


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
    """See `reference.paged_attention`.

    The query heads of a key/value head and the rows of a slot share a tile, so keys and values are read once
    for all of them. The context of a slot is cut into a static number of splits, so that a batch of one fills
    the GPU. Their length is computed on the device, so that a short context has short loops. A second kernel
    merges the splits. For many rows of prompts, a Hopper GPU has a faster kernel (`mosaic_kernel.py`).
    """
    batch, num_rows, num_heads, head_dim = queries.shape
    heads, page_size, width = cache.shape[1], cache.shape[3], page_table.shape[1]
    if queries.size == 0:
        return queries
    is_coded = isinstance(cache, CodedCache)
    if is_exact() and (is_coded or queries.dtype == cache.dtype) and queries.dtype.itemsize == 2:
        return triton_exact.paged_attention(queries, cache, page_table, first, last, scale=scale, sinks=sinks)
    group = num_heads // heads
    rows = group * num_rows
    wide = queries.dtype == jnp.float32
    # Prompts in tiles of 128 rows with 4 warps took 0.33 ms, tiles of 64 rows with 8 warps 0.79 ms (2048 rows
    # after 2048 others).
    block_rows = min(max(triton.next_power_of_2(rows), 16), 16 if wide else 128)
    # The 192 rows of a chunk of SmolLM2-135M fill three tiles of 64, but only one and a half of 128: 44 us
    # instead of 66. Where rows fill tiles of 128, these are faster (docs/measurements.md).
    fits_half = not wide and head_dim <= 64 and rows > 128 and 0 < rows % 128 <= 64
    if fits_half:
        block_rows = 64
    tiles = triton.cdiv(rows, block_rows)
    count, context = batch * heads * tiles, width * page_size
    # Small tiles hide the memory's latency if many run at once on a multiprocessor. If there are too few for
    # that, each has to load more keys at once (docs/measurements.md).
    many = block_rows == 16 and count >= 128
    light = head_dim <= 128 and not wide
    loads_more = light and ((many and count < 512) or (block_rows == 32 and count >= 256))
    crowded = many and not loads_more
    block_keys = 32 if wide else 128 if fits_half or loads_more else 64
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    # A tile has at least 16 pairs. With 128 rows, registers do not suffice.
    has_pairs = head_dim % 2 == 0 and block_dim >= 32 and block_rows <= 64
    is_paired = isinstance(cache, CodedCache) and queries.dtype == jnp.bfloat16 and has_pairs
    # Enough to fill the multiprocessors of the largest GPUs a few times; those that read pairs of codes wait
    # less, and four of them run at once on each. The partial results of tiles of many rows are large, so
    # merging them costs more than it gains once there is one for every multiprocessor.
    programs = 128 if rows > 64 and not wide else 512 if is_paired else 768
    if light and count >= 256 and context <= _LONGEST_WHOLE:
        programs = count  # a split each: merging two or three takes longer than they gain
    splits = num_splits(count, context, block_keys, programs=programs)
    if not isinstance(cache, CodedCache) and splits == 1 and mosaic_kernel.is_faster(queries, cache):
        return mosaic_kernel.paged_attention(
            queries, cache, page_table, first, last, scale=scale, sinks=sinks
        )
    sizes = {
        "num_rows": num_rows,
        "heads": heads,
        "group": group,
        "head_dim": head_dim,
        "splits": splits,
        "block_dim": block_dim,
    }
    shape = (batch, heads, splits, rows)
    partial = [
        jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    whole = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    parts = triton_call(
        _split_kernel,
        # Without sinks or exponents, these pointers are never read.
        (
            queries,
            cache.codes if isinstance(cache, CodedCache) else cache,
            cache.exponents if isinstance(cache, CodedCache) else first,
            page_table,
            first,
            last,
            first if sinks is None else sinks,
        ),
        # A single split writes the result directly; the kernel takes the same number of pointers.
        [whole, *(jax.ShapeDtypeStruct((1,), jnp.float32) for _ in range(2))] if splits == 1 else partial,
        grid=(batch * heads, tiles, splits),
        num_warps=2 if crowded else 4,
        num_stages=2 if wide or crowded or loads_more or fits_half else 3,
        page_size=page_size,
        width=width,
        # In powers of two, which the GPU computes faster.
        scale=scale * math.log2(math.e),
        has_sinks=sinks is not None,
        is_coded=is_coded,
        is_paired=is_paired,
        block_rows=block_rows,
        block_keys=block_keys,
        **sizes,
    )
    if splits == 1:
        return parts[0]
    (merged,) = triton_call(
        merge_kernel,
        parts,
        [whole],
        grid=(batch * heads, rows),
        num_warps=1 if splits * block_dim <= 1024 else 4,
        block_splits=triton.next_power_of_2(splits),
        **sizes,
    )
    return merged


@triton.jit
def _split_kernel(
    queries,
    cache,
    exponents,
    page_table,
    first,
    last,
    sinks,
    outputs,
    peaks,
    totals,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
    scale: tl.constexpr,
    has_sinks: tl.constexpr,
    is_coded: tl.constexpr,
    is_paired: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Attention of a tile of rows to a split of its slot's context.

    If `is_paired`, two adjacent codes are loaded as a word, so that tensor cores' operands may be read from
    shared memory as words, and numbers of even and of odd dimensions are multiplied apart.
    """
    # Slots run from the last to the first: later chunks of a prompt see more positions, and the longest
    # programs should start first.
    slot = (tl.num_programs(0) - 1 - tl.program_id(0)) // heads
    head = (tl.num_programs(0) - 1 - tl.program_id(0)) % heads
    split = tl.program_id(2)
    rows: tl.constexpr = num_rows * group

    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    in_rows = row < rows
    per_word: tl.constexpr = 2 if is_paired else 1
    columns: tl.constexpr = block_dim // per_word
    held_dim: tl.constexpr = head_dim // per_word
    held = tl.arange(0, columns)
    dim = per_word * held
    in_dim = held < held_dim
    if is_paired:
        cache = cache.to(tl.pointer_type(tl.uint16), bitcast=True)
    query_row = slot * num_rows + row // group
    row_first = tl.load(first + query_row, mask=in_rows, other=0)
    row_last = tl.load(last + query_row, mask=in_rows, other=-1)
    begin, end = split_bounds(row_first, row_last, width * page_size, split, splits, block_keys)

    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    output = tl.zeros((block_rows, columns), tl.float32)
    odd_output = output
    writes = begin < end
    if has_sinks and split == 0:
        # A sink is a key that every row has seen before the first split.
        sink = tl.load(sinks + head * group + row % group, mask=in_rows, other=0.0)
        peak = sink.to(tl.float32) * 1.4426950408889634
        total = tl.full((block_rows,), 1.0, tl.float32)
        writes = True
    query_at = (query_row * heads + head) * group + row % group
    if begin < end:
        query_pointers = queries + query_at[:, None] * head_dim + dim[None, :]
        in_query = in_rows[:, None] & in_dim[None, :]
        query = tl.load(query_pointers, mask=in_query, other=0.0)
        if is_paired:
            odd_query = tl.load(query_pointers + 1, mask=in_query, other=0.0)
        all_see_from = tl.max(tl.where(in_rows, row_first, 0))
        all_see_to = tl.min(tl.where(in_rows, row_last, 2147483647)) + 1
        for start in range(begin, end, block_keys):
            position = start + tl.arange(0, block_keys)
            used = position < end
            page = tl.load(page_table + slot * width + position // page_size, mask=used, other=0)
            # 64 bits: a cache may hold more than 2^31 numbers.
            key_row = (page.to(tl.int64) * heads + head) * 2 * page_size + position % page_size
            mask = used[:, None] & in_dim[None, :]
            at = key_row[:, None] * held_dim + held[None, :]
            if is_paired:
                key, odd_key = load_pairs(cache + at, mask)
                value, odd_value = load_pairs(cache + at + page_size * held_dim, mask)
                scores = tl.dot(odd_query, tl.trans(odd_key), tl.dot(query, tl.trans(key))) * scale
            else:
                key = tl.load(cache + at, mask=mask, other=0.0).to(query.dtype)
                value = tl.load(cache + at + page_size * head_dim, mask=mask, other=0.0).to(query.dtype)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if is_coded:
                scores *= load_scales(exponents + key_row, used)[None, :]
            if (start < all_see_from) | (start + block_keys > all_see_to):
                visible = (position[None, :] >= row_first[:, None]) & (position[None, :] <= row_last[:, None])
                scores = tl.where(visible & used[None, :], scores, float("-inf"))
            weights, peak, total, shrink = absorb_scores(scores, peak, total)
            if is_coded:
                weights *= load_scales(exponents + key_row + page_size, used)[None, :]
            weights = weights.to(query.dtype)
            output = tl.dot(weights, value, output * shrink[:, None], input_precision="ieee")
            if is_paired:
                odd_output = tl.dot(weights, odd_value, odd_output * shrink[:, None])

    mask = in_rows[:, None] & in_dim[None, :]
    if splits == 1:
        divisor = tl.where(total == 0.0, 1.0, total)[:, None]
        out = outputs + query_at[:, None] * head_dim + dim[None, :]
        tl.store(out, (output / divisor).to(outputs.dtype.element_ty), mask=mask)
        if is_paired:
            tl.store(out + 1, (odd_output / divisor).to(outputs.dtype.element_ty), mask=mask)
    else:
        part_row = ((slot * heads + head) * splits + split) * rows + row
        tl.store(peaks + part_row, peak, mask=in_rows)
        tl.store(totals + part_row, total, mask=in_rows)
        if writes:
            out = outputs + part_row[:, None] * head_dim + dim[None, :]
            tl.store(out, output, mask=mask)
            if is_paired:
                tl.store(out + 1, odd_output, mask=mask)
