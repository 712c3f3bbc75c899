"""Paged attention in Triton whose sums are ordered by position alone (`engine.exact = true`).

The positions of a slot are cut into fixed ranges. Each range is an online softmax over fixed blocks of keys,
with a peak, a total and sums of its own, and ranges are merged in order. So it does not matter how many rows
share a tile, which of its positions other rows see, or how many programs share a context: what a row does not
see adds zeros. Sums over keys are products on tensor cores, whose order does not depend on the tile, also
those of the weights. Multiplications and additions are fused where this file says so, and nowhere else.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache
from jaxspec_kernels.attention_parts.context_splits import load_scales
from jaxspec_kernels.calls.triton_call import triton_call

_KEYS = tl.constexpr(64)
"""Positions of a block."""
_RANGE = tl.constexpr(256)
_LONG_RANGE = tl.constexpr(2048)
_NUM_SHORT = tl.constexpr(32)
"""The first `_NUM_SHORT` ranges have `_RANGE` positions and let many programs share a context. Later ones
have `_LONG_RANGE`, so that partial results stay small."""
_ONES = tl.constexpr(16)
"""Columns of ones that weights are multiplied with for their sum: the fewest of a tile."""


def num_ranges(context: int) -> int:
    """The number of ranges of a context of so many positions."""
    short = _RANGE.value * _NUM_SHORT.value
    few, more = min(context, short), max(context - short, 0)
    return -(-few // _RANGE.value) + -(-more // _LONG_RANGE.value)


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames="scale")
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
    """See `reference.paged_attention`, for queries and a cache of one dtype of 16 bits, or a `CodedCache`."""
    batch, num_rows, num_heads, head_dim = queries.shape
    heads, page_size, width = cache.shape[1], cache.shape[3], page_table.shape[1]
    group = num_heads // heads
    rows = group * num_rows
    block_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    tiles = triton.cdiv(rows, block_rows)
    ranges = num_ranges(width * page_size)
    # Enough programs to fill the multiprocessors a few times. Merging two or three short splits would take
    # longer than they gain.
    count = batch * heads * tiles
    is_short = count >= 256 and width * page_size <= _RANGE.value * _NUM_SHORT.value
    splits = 1 if is_short else max(1, min(768 // count, ranges))
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    sizes = {
        "num_rows": num_rows,
        "heads": heads,
        "group": group,
        "head_dim": head_dim,
        "ranges": ranges,
        "block_dim": block_dim,
        "has_sinks": sinks is not None,
    }
    # Without sinks, this pointer is never read.
    sink = first if sinks is None else sinks
    # Without exponents, that pointer is never read.
    held = (cache.codes, cache.exponents) if isinstance(cache, CodedCache) else (cache, first)
    whole = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    shape = (batch, heads, ranges, rows)
    partial = [jax.ShapeDtypeStruct(of, jnp.float32) for of in ((*shape, head_dim), shape, shape)]
    parts = triton_call(
        _ranges_kernel,
        (queries, *held, page_table, first, last, sink),
        # A single split writes the result directly; the kernel takes the same number of pointers.
        [whole, *(jax.ShapeDtypeStruct((1,), jnp.float32) for _ in range(2))] if splits == 1 else partial,
        grid=(batch * heads, tiles, splits),
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
        fuses=False,
        page_size=page_size,
        width=width,
        splits=splits,
        # In powers of two, which the GPU computes faster.
        scale=scale * math.log2(math.e),
        is_coded=isinstance(cache, CodedCache),
        block_rows=block_rows,
        **sizes,
    )
    if splits == 1:
        return parts[0]
    (merged,) = triton_call(
        _merge_kernel,
        (*parts, first, last, sink),
        [whole],
        grid=(batch * heads, rows),
        num_warps=1 if block_dim <= 128 else 2,
        fuses=False,
        limit=width * page_size,
        **sizes,
    )
    return merged


@triton.jit
def _range_of(position):
    """The range that a position belongs to."""
    short: tl.constexpr = _RANGE * _NUM_SHORT
    return tl.where(position < short, position // _RANGE, _NUM_SHORT + (position - short) // _LONG_RANGE)


@triton.jit
def _start_of(number):
    """The first position of a range."""
    short: tl.constexpr = _RANGE * _NUM_SHORT
    return tl.where(number < _NUM_SHORT, number * _RANGE, short + (number - _NUM_SHORT) * _LONG_RANGE)


@triton.jit
def _is_last_block(start):
    """Whether the block at a position is the last one of its range."""
    short: tl.constexpr = _RANGE * _NUM_SHORT
    length = tl.where(start < short, _RANGE, _LONG_RANGE)
    return (start + _KEYS) % length == 0


@triton.jit
def _merge(peak, total, output, range_peak, range_total, range_output):
    """Merges a range into those before it: peaks and totals [rows], outputs [rows, head_dim]."""
    new_peak = tl.maximum(peak, range_peak)
    # A row that has seen nothing yet has a peak of -inf, and -inf - -inf is NaN.
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    before, now = tl.exp2(peak - safe_peak), tl.exp2(range_peak - safe_peak)
    total = tl.fma(total, before, range_total * now)
    shape: tl.constexpr = output.shape
    now_wide, before_wide = tl.broadcast_to(now[:, None], shape), tl.broadcast_to(before[:, None], shape)
    return new_peak, total, tl.fma(output, before_wide, range_output * now_wide)


@triton.jit
def _ranges_kernel(
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
    ranges: tl.constexpr,
    splits: tl.constexpr,
    scale: tl.constexpr,
    has_sinks: tl.constexpr,
    is_coded: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Attention of a tile of rows to some ranges of its slot.

    Args:
      outputs: the result if there is one split; else f32[slots, heads, ranges, rows, head_dim], with rows =
        num_rows * group, one part for every range that a row of its tile sees.
      peaks, totals: f32[slots, heads, ranges, rows] of these parts.
    """
    # Slots run from the last to the first: later chunks of a prompt see more positions, and the longest
    # programs should start first.
    slot = (tl.num_programs(0) - 1 - tl.program_id(0)) // heads
    head = (tl.num_programs(0) - 1 - tl.program_id(0)) % heads
    rows: tl.constexpr = num_rows * group
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    in_rows = row < rows
    dim = tl.arange(0, block_dim)
    in_dim = dim < head_dim
    query_row = slot * num_rows + row // group
    row_first = tl.load(first + query_row, mask=in_rows, other=0)
    row_last = tl.load(last + query_row, mask=in_rows, other=-1)
    sees = row_last >= row_first
    # Positions that no row of the tile sees are never read: they may hold another request's keys, or NaN.
    tile_first = tl.maximum(tl.min(tl.where(sees, row_first, 2147483647)), 0)
    tile_end = tl.minimum(tl.max(tl.where(sees, row_last, -1)), width * page_size - 1) + 1
    begin, end = tile_first // _KEYS * _KEYS, tile_end
    if splits > 1:
        first_range = _range_of(tile_first)
        count = tl.where(tile_first < tile_end, _range_of(tl.maximum(tile_end - 1, 0)) + 1 - first_range, 0)
        each = tl.cdiv(count, splits)
        mine = first_range + tl.program_id(2) * each
        begin = tl.maximum(begin, _start_of(mine))
        end = tl.minimum(end, _start_of(mine + each))

    query_at = (query_row * heads + head) * group + row % group
    mask = in_rows[:, None] & in_dim[None, :]
    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    if has_sinks and splits == 1:
        # A sink is a key that every row has seen before the first range.
        sink = tl.load(sinks + head * group + row % group, mask=in_rows, other=0.0)
        peak, total = sink.to(tl.float32) * 1.4426950408889634, tl.full((block_rows,), 1.0, tl.float32)
    output = tl.zeros((block_rows, block_dim), tl.float32)
    range_peak = tl.full((block_rows,), float("-inf"), tl.float32)
    range_total = tl.zeros((block_rows, _ONES), tl.float32)
    range_output = tl.zeros((block_rows, block_dim), tl.float32)
    query = tl.load(queries + query_at[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
    ones = tl.full((_KEYS, _ONES), 1.0, query.dtype)
    all_see_from = tl.max(tl.where(in_rows, row_first, 0))
    all_see_to = tl.min(tl.where(in_rows, row_last, 2147483647)) + 1
    for start in range(begin, end, _KEYS):
        position = start + tl.arange(0, _KEYS)
        used = (position >= tile_first) & (position < tile_end)
        page = tl.load(page_table + slot * width + position // page_size, mask=used, other=0)
        # 64 bits: a cache may hold more than 2^31 numbers.
        key_row = (page.to(tl.int64) * heads + head) * 2 * page_size + position % page_size
        in_cache = used[:, None] & in_dim[None, :]
        at = key_row[:, None] * head_dim + dim[None, :]
        key = tl.load(cache + at, mask=in_cache, other=0.0).to(query.dtype)
        value = tl.load(cache + at + page_size * head_dim, mask=in_cache, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key))
        if is_coded:
            scores *= load_scales(exponents + key_row, used)[None, :]
        if (start < all_see_from) | (start + _KEYS > all_see_to):
            visible = (position[None, :] >= row_first[:, None]) & (position[None, :] <= row_last[:, None])
            scores = tl.where(visible & used[None, :], scores, float("-inf"))
        new_peak = tl.maximum(range_peak, tl.max(scores, 1) * scale)
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(range_peak - safe_peak)
        below = tl.broadcast_to(-safe_peak[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), below)).to(query.dtype)
        range_peak = new_peak
        range_total = tl.dot(weights, ones, range_total * shrink[:, None])
        if is_coded:
            # Powers of two round nothing.
            wide = weights.to(tl.float32) * load_scales(exponents + key_row + page_size, used)[None, :]
            weights = wide.to(query.dtype)
        range_output = tl.dot(weights, value, range_output * shrink[:, None])
        if _is_last_block(start) | (start + _KEYS >= end):
            sums = tl.max(range_total, 1)  # all columns are equal
            if splits == 1:
                peak, total, output = _merge(peak, total, output, range_peak, sums, range_output)
            else:
                part_row = ((slot * heads + head) * ranges + _range_of(start)) * rows + row
                tl.store(peaks + part_row, range_peak, mask=in_rows)
                tl.store(totals + part_row, sums, mask=in_rows)
                part_at = part_row[:, None].to(tl.int64) * head_dim + dim[None, :]
                tl.store(outputs + part_at, range_output, mask=mask)
            range_peak = tl.full((block_rows,), float("-inf"), tl.float32)
            range_total = tl.zeros((block_rows, _ONES), tl.float32)
            range_output = tl.zeros((block_rows, block_dim), tl.float32)
    if splits == 1:
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            outputs + query_at[:, None] * head_dim + dim[None, :],
            output.to(outputs.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def _merge_kernel(
    parts,
    peaks,
    totals,
    first,
    last,
    sinks,
    outputs,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    ranges: tl.constexpr,
    limit: tl.constexpr,
    has_sinks: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Merges the ranges that one row sees, in order; arguments as of `_ranges_kernel`."""
    slot, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    row = tl.program_id(1) + tl.arange(0, 1)
    rows: tl.constexpr = num_rows * group
    dim = tl.arange(0, block_dim)[None, :]
    query_row = slot * num_rows + tl.program_id(1) // group
    row_first = tl.maximum(tl.load(first + query_row), 0)
    row_last = tl.minimum(tl.load(last + query_row), limit - 1)
    begin, end = 0, 0
    if row_first <= row_last:
        begin, end = _range_of(row_first), _range_of(row_last) + 1
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if has_sinks:
        peak = tl.load(sinks + head * group + row % group).to(tl.float32) * 1.4426950408889634
        total = tl.full((1,), 1.0, tl.float32)
    output = tl.zeros((1, block_dim), tl.float32)
    for number in range(begin, end):
        part_row = ((slot * heads + head) * ranges + number) * rows + row
        part = tl.load(
            parts + part_row[:, None].to(tl.int64) * head_dim + dim, mask=dim < head_dim, other=0.0
        )
        peak, total, output = _merge(
            peak, total, output, tl.load(peaks + part_row), tl.load(totals + part_row), part
        )
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    at = ((slot * num_rows + row // group) * heads + head) * group + row % group
    tl.store(outputs + at[:, None] * head_dim + dim, output.to(outputs.dtype.element_ty), mask=dim < head_dim)
