"""Paged attention of a few rows on a CPU, without a copy of the pages.

The pure-JAX reference gathers pages into a new array; this kernel reads them in place. A row's sums do not
depend on the other rows: it is summed in lanes, over the positions that it sees, in their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.attention_parts.attention_code import (
    decoding_code,
    lanes_of,
    scores_code,
    softmax_code,
    values_code,
    widening_code,
)
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, HALF, VectorCode, word
from jaxspec_kernels.paged_attention.reference import paged_attention as reference
from numba import types
from numba.core.cgutils import for_range

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
    cache: Cache,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `jaxspec_kernels.paged_attention.reference`, which is called for cases that the kernel lacks."""
    reads = cache.dtype in (jnp.float32, jnp.float16) or isinstance(cache, CodedCache)
    if not (queries.dtype == jnp.float32 and reads and queries.shape[1] <= MAX_ROWS and sinks is None):
        return reference(queries, cache, page_table, first, last, scale=scale, sinks=sinks)
    held = [cache.codes, cache.exponents] if isinstance(cache, CodedCache) else [cache]
    target = _target(*cache.shape[3:], dtype=str(cache.dtype))
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(queries.shape, jnp.float32))(
        queries, held[0], page_table, first, last, np.array([scale], np.float32), *held[1:]
    )


def _target(page_size: int, dim: int, *, dtype: str) -> str:
    """The name of the kernel for these sizes; there are few different ones."""
    return _registered(min(page_size, 16), min(lanes_of(dim), page_size), dim, dtype)


_SUFFIXES = {"float32": "", "float16": "_half", "float8_e4m3fn": "_coded"}


@call.once
def _registered(tile_size: int, lanes: int, dim: int, dtype: str) -> str:
    """Compiles and registers a kernel; returns its name.

    Args:
      tile_size: positions whose scores are computed together; pages consist of whole tiles.
      lanes: of a vector; divides `tile_size` and `dim`.
      dim: the width of a head.
      dtype: that of the cache; float8_e4m3fn is a `CodedCache`.
    """
    is_coded = dtype == "float8_e4m3fn"
    kind, size = (FLOAT, 4) if dtype == "float32" else (HALF, 1 if is_coded else 2)
    # Bytes of a row in float32, and as the cache holds it.
    row_bytes, held_bytes = 4 * dim, size * dim
    # As many rows as there are registers for their sums.
    joined = 4 if lanes == 16 else 2
    # More rows than this share a tile that is converted to float32 once.
    few = joined // 2 if dtype == "float16" else 0
    fetch, widen = _fetch_code(tile_size * held_bytes), _widening(is_coded, kind, tile_size, lanes, dim)
    exponents_at = 6 if is_coded else 1
    scores, scores_held = (scores_code(tile_size, lanes, dim, of) for of in (FLOAT, kind))
    add, add_held = (values_code(lanes, dim, 1, of) for of in (FLOAT, kind))
    add_joined, softmax = values_code(lanes, dim, joined, FLOAT), softmax_code(lanes)

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
            exponents = call.address(call.argument(frame, exponents_at)) + 2 * page_size * kv_head
            entry = table_width * b
            for tile in range(low // tile_size, -(-high // tile_size)):
                left, later = tile * tile_size, (tile + _AHEAD) * tile_size
                keys = head + page * table[entry + left // page_size] + held_bytes * (left % page_size)
                if later < high:
                    fetch(head + page * table[entry + later // page_size] + held_bytes * (later % page_size))
                fetch(keys + held_bytes * page_size)
                if count > few:
                    of_tile = exponents + 2 * page_size * kv_heads * table[entry + left // page_size]
                    keys = widen(keys, of_tile + left % page_size, wide)
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
                    of_tile = exponents + 2 * page_size * kv_heads * table[entry + left // page_size]
                    values = widen(values, of_tile + page_size + left % page_size, wide)
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

    name = f"jaxspec_paged_attention_{tile_size}_{lanes}_{dim}{_SUFFIXES[dtype]}"
    return call.register(name, kernel, fastmath=set())


def _widening(is_coded: bool, kind: Any, rows: int, lanes: int, dim: int) -> Any:
    """A function of the addresses of rows, of their exponents and of memory for them as float32."""
    if is_coded:
        return decoding_code(lanes, dim, rows)
    widen = widening_code(kind, lanes, rows * dim)

    @call.inlined
    def without_exponents(held, exponents, result):
        return widen(held, result)

    return without_exponents


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
