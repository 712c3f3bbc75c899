"""Paged attention of a few rows on a CPU, without a copy of the pages.

The pure-JAX reference gathers pages into a new array; this kernel reads them in place. A row's sums do not
depend on the other rows: it is summed in lanes, over the positions that it sees, in their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.paged_attention.reference import paged_attention as reference
from jaxspec_kernels.vector_code import FLOAT, HALF, INTEGER, VectorCode, word
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, for_range_slice

MAX_ROWS = 16
_TOGETHER = 48
"""The most query rows, of one key/value head, that go through keys and values together."""
_PIECES = 2
"""Pieces of work for each thread, if there are so many rows."""
_AHEAD = 2
"""Distance of prefetches, in tiles. Hardware prefetching stops at the end of a page of memory, which holds a
tile of a head of 64."""


def paged_attention(
    queries: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `jaxspec_kernels.paged_attention.reference`, which is called for cases that the kernel lacks."""
    is_float = queries.dtype == jnp.float32 and cache.dtype in (jnp.float32, jnp.float16)
    if not (is_float and queries.shape[1] <= MAX_ROWS and sinks is None):
        return reference(queries, cache, page_table, first, last, scale=scale, sinks=sinks)
    target = _target(*cache.shape[3:], is_half=cache.dtype == jnp.float16)
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(queries.shape, jnp.float32))(
        queries, cache, page_table, first, last, np.array([scale], np.float32)
    )


def _target(page_size: int, dim: int, *, is_half: bool) -> str:
    """The name of the kernel for these sizes; there are few different ones."""
    widest = 16 if "avx512f" in call.features() else 8
    lanes = next(lanes for lanes in (16, 8, 4, 2, 1) if lanes <= widest and not dim % lanes)
    lanes = min(lanes, page_size)
    return _registered(min(page_size, 16), lanes, dim, is_half)


@call.once
def _registered(tile_size: int, lanes: int, dim: int, is_half: bool) -> str:
    """Compiles and registers a kernel; returns its name.

    Args:
      tile_size: positions whose scores are computed together; pages consist of whole tiles.
      lanes: of a vector; divides `tile_size` and `dim`.
      dim: the width of a head.
      is_half: whether the cache is float16.
    """
    kind, size = (HALF, 2) if is_half else (FLOAT, 4)
    # Bytes of a row in float32, and as the cache holds it.
    row_bytes, held_bytes = 4 * dim, size * dim
    # As many rows as there are registers for their sums.
    joined = 4 if lanes == 16 else 2
    # More rows than this share a tile that is converted to float32 once.
    few = joined // 2 if is_half else 0
    fetch, widen = _fetch_code(tile_size * held_bytes), _widening_code(kind, lanes, tile_size * dim)
    scores, scores_held = (_scores_code(tile_size, lanes, dim, of) for of in (FLOAT, kind))
    add, add_held = (_values_code(lanes, dim, 1, of) for of in (FLOAT, kind))
    add_joined, softmax = _values_code(lanes, dim, joined, FLOAT), _softmax_code(lanes)

    def kernel(frame, part, parts):
        queries_, cache_, output_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
        batch, rows, heads, _ = call.shape(queries_, 4)
        _, kv_heads, _, page_size, _ = call.shape(cache_, 5)
        table_width = call.shape(call.argument(frame, 2), 2)[1]
        queries, output = call.floats(queries_), call.floats(output_)
        table = call.integers(call.argument(frame, 2))
        firsts, lasts = call.integers(call.argument(frame, 3)), call.integers(call.argument(frame, 4))
        scale = call.floats(call.argument(frame, 5))[0]
        group, width = heads // kv_heads, table_width * page_size
        pairs = rows * group
        blocks = max(-(-pairs // _TOGETHER), min(pairs, -(-_PIECES * parts // (batch * kv_heads))))
        most = -(-pairs // blocks)
        scratch = call.allocate(row_bytes * (2 * most + tile_size) + 4 * width * most)
        sums_at, wide = scratch + row_bytes * most, scratch + row_bytes * 2 * most
        weights = wide + row_bytes * tile_size
        query, sums = call.floats_at(scratch), call.floats_at(sums_at)
        bounds = call.allocate((8 + 8 + 4) * most)
        begin, end = call.words_at(bounds), call.words_at(bounds + 8 * most)
        total = call.floats_at(bounds + 16 * most)
        units = batch * kv_heads * blocks
        for unit in range(units * part // parts, units * (part + 1) // parts):
            b, kv_head, block = unit // blocks // kv_heads, unit // blocks % kv_heads, unit % blocks
            start = pairs * block // blocks
            count = pairs * (block + 1) // blocks - start
            low, high = width, 0
            # Every row sees all positions from full_low to full_high.
            full_low, full_high = 0, width
            for i in range(count):
                row, member = (start + i) // group, (start + i) % group
                begin[i], end[i] = max(firsts[rows * b + row], 0), lasts[rows * b + row] + 1
                of_head = dim * (heads * (rows * b + row) + kv_head * group + member)
                for d in range(dim):
                    query[dim * i + d] = queries[of_head + d] * scale
                    sums[dim * i + d] = np.float32(0)
                full_low, full_high = max(full_low, begin[i]), min(full_high, end[i])
                if begin[i] < end[i]:
                    low, high = min(low, begin[i]), max(high, end[i])
            head = call.address(cache_) + 2 * page_size * held_bytes * kv_head
            page = 2 * page_size * held_bytes * kv_heads
            entry = table_width * b
            for tile in range(low // tile_size, -(-high // tile_size)):
                left, later = tile * tile_size, (tile + _AHEAD) * tile_size
                keys = head + page * table[entry + left // page_size] + held_bytes * (left % page_size)
                if later < high:
                    fetch(head + page * table[entry + later // page_size] + held_bytes * (later % page_size))
                fetch(keys + held_bytes * page_size)
                if count > few:
                    keys = widen(keys, wide)
                for i in range(count):
                    if begin[i] < left + tile_size and left < end[i]:
                        of_row = weights + 4 * (width * i + left)
                        if count > few:
                            scores(scratch + row_bytes * i, keys, of_row)
                        else:
                            scores_held(scratch + row_bytes * i, keys, of_row)
            for i in range(count):
                if begin[i] < end[i]:
                    total[i] = softmax(weights + 4 * width * i, begin[i], end[i])
            for tile in range(low // tile_size, -(-high // tile_size)):
                left = tile * tile_size
                keys = head + page * table[entry + left // page_size] + held_bytes * (left % page_size)
                values = keys + held_bytes * page_size
                if count > few:
                    values = widen(values, wide)
                i = 0
                if full_low <= left and left + tile_size <= full_high:
                    while i + joined <= count:
                        of_rows = weights + 4 * (width * i + left)
                        add_joined(of_rows, 4 * width, values, tile_size, sums_at + row_bytes * i)
                        i += joined
                while i < count:
                    top, bottom = max(begin[i], left), min(end[i], left + tile_size)
                    if top < bottom:
                        of_row = weights + 4 * (width * i + top)
                        if count > few:
                            add(
                                of_row,
                                0,
                                values + row_bytes * (top - left),
                                bottom - top,
                                sums_at + row_bytes * i,
                            )
                        else:
                            add_held(
                                of_row,
                                0,
                                values + held_bytes * (top - left),
                                bottom - top,
                                sums_at + row_bytes * i,
                            )
                    i += 1
            for i in range(count):
                row, member = (start + i) // group, (start + i) % group
                # A row that sees nothing has sums of zero.
                inverse = np.float32(1) / total[i] if begin[i] < end[i] else np.float32(1)
                of_head = dim * (heads * (rows * b + row) + kv_head * group + member)
                for d in range(dim):
                    output[of_head + d] = sums[dim * i + d] * inverse
        call.release(scratch)
        call.release(bounds)
        return 0

    name = f"jaxspec_paged_attention_{tile_size}_{lanes}_{dim}{'_half' * is_half}"
    return call.register(name, kernel, fastmath=set())


def _fetch_code(size: int) -> Any:
    """A Numba intrinsic that asks for `size` bytes at an address to be brought into the cache."""

    @call.intrinsic
    def fetch(typing_context, address):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, 1)
            with for_range(builder, word(-(-size // call.CACHE_LINE))) as loop:
                code.prefetch(code.at(arguments[0], loop.index, call.CACHE_LINE), into=1)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return fetch


def _widening_code(kind: ir.Type, lanes: int, count: int) -> Any:
    """A Numba intrinsic that converts `count` numbers of LLVM's type `kind` to float32.

    Its arguments are their address and that of memory for the result. It returns the address of the result,
    which for float32 is that of the numbers themselves.
    """

    @call.intrinsic
    def widen(typing_context, numbers, result):
        def generate(context, builder, signature, arguments):
            numbers, result = arguments
            if kind is FLOAT:
                return numbers
            code = VectorCode(builder, lanes)
            with for_range(builder, word(count // lanes)) as loop:
                vector = code.floats_at(code.at(numbers, loop.index, 2 * lanes), kind)
                code.store(vector, code.at(result, loop.index, 4 * lanes), align=4)
            return result

        return types.int64(types.int64, types.int64), generate

    return widen


def _scores_code(tile: int, lanes: int, dim: int, kind: ir.Type) -> Any:
    """A Numba intrinsic that computes the products of a query and the keys of a tile.

    Its arguments are the addresses of the query f32[dim], the keys [tile, dim] of LLVM's type `kind` and the
    result f32[tile].
    """
    size = 2 if kind is HALF else 4

    @call.intrinsic
    def scores(typing_context, query, keys, result):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            query, keys, result = arguments
            for first in range(0, tile, lanes):
                sums = [ir.Constant(code.floats, None)] * lanes
                for part in range(dim // lanes):
                    factor = code.load(code.at(query, part, 4 * lanes), code.floats, align=4)
                    for i in range(lanes):
                        key = code.at(keys, (first + i) * dim + part * lanes, size)
                        sums[i] = code.fma(factor, code.floats_at(key, kind), sums[i])
                code.store(code.sums_of(sums), code.at(result, first, 4), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return scores


def _softmax_code(lanes: int) -> Any:
    """A Numba intrinsic that replaces scores by exp(score - largest score) and returns their sum f32.

    Its arguments are the address of the scores f32[...], padded to whole vectors, and the positions `begin` <
    `end` of those that count. A NaN among them makes the sum NaN.
    """

    @call.intrinsic
    def softmax(typing_context, scores, begin, end):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            scores, begin, end = arguments
            from_ = builder.udiv(begin, word(lanes))
            to = builder.udiv(builder.add(end, word(lanes - 1)), word(lanes))
            integers = ir.VectorType(INTEGER, lanes)
            offsets = ir.Constant(integers, list(range(lanes)))

            def counted(index: Any) -> Any:
                left = builder.trunc(builder.mul(index, word(lanes)), INTEGER)
                at = builder.add(code.spread(left), offsets)
                after = builder.icmp_signed(">=", at, code.spread(builder.trunc(begin, INTEGER)))
                return builder.and_(
                    after, builder.icmp_signed("<", at, code.spread(builder.trunc(end, INTEGER)))
                )

            peaks = alloca_once_value(builder, code.constant(-np.inf))
            builder.store(code.constant(-np.inf), peaks)
            with for_range_slice(builder, from_, to, word(1), inc=True) as (index, _):
                score = code.load(code.at(scores, index, 4 * lanes), code.floats, align=4)
                score = builder.select(counted(index), score, code.constant(-np.inf))
                peak = builder.load(peaks)
                builder.store(code.larger(score, peak), peaks)
            peak = code.spread(code.folded(builder.load(peaks), code.larger))
            totals = alloca_once_value(builder, code.constant(0.0))
            builder.store(code.constant(0.0), totals)
            with for_range_slice(builder, from_, to, word(1), inc=True) as (index, _):
                place = code.at(scores, index, 4 * lanes)
                score = code.load(place, code.floats, align=4)
                value = code.exp(builder.fsub(score, peak))
                value = builder.select(counted(index), value, code.constant(0.0))
                code.store(value, place, align=4)
                builder.store(builder.fadd(builder.load(totals), value), totals)
            return code.folded(builder.load(totals), builder.fadd)

        return types.float32(*[types.int64] * 3), generate

    return softmax


def _values_code(lanes: int, dim: int, rows: int, kind: ir.Type) -> Any:
    """A Numba intrinsic that adds weighted values to the sums of `rows` rows.

    Its arguments are the address of the first row's weights f32[count], the distance in bytes to those of the
    next row, the address of the values [count, dim] of LLVM's type `kind`, count, and the address of the sums
    f32[rows, dim].
    """
    size = 2 if kind is HALF else 4
    joined = next(joined for joined in (4, 2, 1) if not dim % (joined * lanes))

    @call.intrinsic
    def add(typing_context, weights, stride, values, count, sums):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            weights, stride, values, count, sums = arguments
            for first in range(0, dim // lanes, joined):
                vectors = range(first, first + joined)
                places = [code.at(sums, row * dim + i * lanes, 4) for row in range(rows) for i in vectors]
                totals = [alloca_once_value(builder, ir.Constant(code.floats, None)) for _ in places]
                for total, place in zip(totals, places, strict=True):
                    builder.store(code.load(place, code.floats, align=4), total)
                with for_range(builder, count) as loop:
                    at = code.at(values, loop.index, size * dim)
                    of_position = [code.floats_at(code.at(at, i, size * lanes), kind) for i in vectors]
                    for row in range(rows):
                        weight = code.at(builder.add(weights, builder.mul(stride, word(row))), loop.index, 4)
                        weight = code.spread(code.load(weight, FLOAT, align=4))
                        of_row = totals[row * joined : (row + 1) * joined]
                        for total, value in zip(of_row, of_position, strict=True):
                            builder.store(code.fma(weight, value, builder.load(total)), total)
                for total, place in zip(totals, places, strict=True):
                    code.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return add
