"""Paged attention of a few rows on a CPU, without a copy of the pages.

The pure-JAX reference gathers pages into a new array; this kernel reads them in place. On two cores, the case
"pages of one" takes 82 us and the reference 292 us, "window of one" 10 us and 304 us
(`scripts/bench_kernels.py --op paged_attention`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.paged_attention.reference import paged_attention as reference
from numba import carray, njit

MAX_ROWS = 16
_FASTMATH = {"contract", "reassoc", "nsz"}
_NAME = "jaxspec_paged_attention"
_part_address = call.address_of(_NAME)


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
    if not (queries.dtype == cache.dtype == jnp.float32 and queries.shape[1] <= MAX_ROWS and sinks is None):
        return reference(queries, cache, page_table, first, last, scale=scale, sinks=sinks)
    return jax.ffi.ffi_call(_target(), jax.ShapeDtypeStruct(queries.shape, jnp.float32))(
        queries, cache, page_table, first, last, np.array([scale], np.float32)
    )


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    call.register(_NAME, _part, _handler, fastmath=_FASTMATH)
    return _NAME


# Always inlined, so that every process runs the same code. Otherwise a process that compiles the kernel calls
# a separately compiled function, while one that loads the kernel from Numba's cache runs an inlined copy,
# which sums in another order.
@njit(fastmath=_FASTMATH, forceinline=True)
def _exponentials(scores, powers):
    """Replaces scores by exp(score - largest score) and returns their sum.

    Written so that LLVM vectorises it: exp(x) is 2 ** n, built from bits in `powers` (i32, at least as long
    as `scores`), times a polynomial of the remainder. The library's exp took most of the kernel's time.
    """
    peak = np.float32(-np.inf)
    for i in range(scores.size):
        peak = max(peak, scores[i])
    for i in range(scores.size):
        # The largest weight is 1; weights below 2 ** -126 do not matter.
        scores[i] = max((scores[i] - peak) * np.float32(1.4426950408889634), np.float32(-126))
        powers[i] = np.int32(scores[i])
    for i in range(scores.size):
        x = (scores[i] - np.float32(powers[i])) * np.float32(0.6931471805599453)
        powers[i] = (powers[i] + 127) << 23
        # exp(x) for -0.7 < x <= 0; the next term is under 3e-8.
        y = np.float32(1 / 362880)
        y = y * x + np.float32(1 / 40320)
        y = y * x + np.float32(1 / 5040)
        y = y * x + np.float32(1 / 720)
        y = y * x + np.float32(1 / 120)
        y = y * x + np.float32(1 / 24)
        y = y * x + np.float32(1 / 6)
        y = y * x + np.float32(1 / 2)
        y = y * x + np.float32(1)
        scores[i] = y * x + np.float32(1)
    total = np.float32(0)
    factors = powers.view(np.float32)
    for i in range(scores.size):
        scores[i] *= factors[i]
        total += scores[i]
    return total


def _part(frame, part, parts):
    """Computes a share of all rows, in blocks of four query rows of one key/value head.

    The rows of a block share each key and value that is loaded. The last block of a head may repeat a row.
    """
    queries_, cache_, output_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
    batch, rows, heads, dim = call.shape(queries_, 4)
    pages, kv_heads, _, page_size, _ = call.shape(cache_, 5)
    table_width = call.shape(call.argument(frame, 2), 2)[1]
    queries = carray(call.floats(queries_), (batch, rows, heads, dim))
    cache = carray(call.floats(cache_), (pages, kv_heads, 2, page_size, dim))
    output = carray(call.floats(output_), (batch, rows, heads, dim))
    table = carray(call.integers(call.argument(frame, 2)), (batch, table_width))
    first = carray(call.integers(call.argument(frame, 3)), (batch, rows))
    last = carray(call.integers(call.argument(frame, 4)), (batch, rows))
    scale = carray(call.floats(call.argument(frame, 5)), 1)[0]
    group = heads // kv_heads
    scores = np.empty((4, table_width * page_size), np.float32)
    query = np.empty((4, dim), np.float32)
    sums = np.empty((4, dim), np.float32)
    begin, end = np.empty(4, np.int64), np.empty(4, np.int64)
    total = np.empty(4, np.float32)
    powers = np.empty(table_width * page_size, np.int32)
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    o0, o1, o2, o3 = sums[0], sums[1], sums[2], sums[3]
    w0, w1, w2, w3 = scores[0], scores[1], scores[2], scores[3]
    blocks = -(-rows * group // 4)
    units = batch * kv_heads * blocks
    for unit in range(units * part // parts, units * (part + 1) // parts):
        b, kv_head, block = unit // blocks // kv_heads, unit // blocks % kv_heads, unit % blocks * 4
        low, high = table_width * page_size, 0
        for i in range(4):
            pair = min(block + i, rows * group - 1)
            row, member = pair // group, pair % group
            begin[i] = max(first[b, row], 0)
            end[i] = last[b, row] + 1
            for d in range(dim):
                query[i, d] = queries[b, row, kv_head * group + member, d] * scale
                sums[i, d] = np.float32(0)
            if begin[i] < end[i]:
                low, high = min(low, begin[i]), max(high, end[i])
        for page in range(low // page_size, (high - 1) // page_size + 1):
            left = page * page_size
            keys = cache[table[b, page], kv_head, 0]
            for position in range(max(low, left), min(high, left + page_size)):
                key = keys[position - left]
                s0 = s1 = s2 = s3 = np.float32(0)
                for d in range(dim):
                    s0 += q0[d] * key[d]
                    s1 += q1[d] * key[d]
                    s2 += q2[d] * key[d]
                    s3 += q3[d] * key[d]
                w0[position], w1[position], w2[position], w3[position] = s0, s1, s2, s3
        for i in range(4):
            weights = scores[i]
            weights[low : begin[i]] = np.float32(0)
            weights[end[i] : high] = np.float32(0)
            total[i] = _exponentials(weights[begin[i] : end[i]], powers)
        for page in range(low // page_size, (high - 1) // page_size + 1):
            left = page * page_size
            values = cache[table[b, page], kv_head, 1]
            for position in range(max(low, left), min(high, left + page_size)):
                value = values[position - left]
                p0, p1, p2, p3 = w0[position], w1[position], w2[position], w3[position]
                for d in range(dim):
                    o0[d] += p0 * value[d]
                    o1[d] += p1 * value[d]
                    o2[d] += p2 * value[d]
                    o3[d] += p3 * value[d]
        for i in range(4):
            pair = min(block + i, rows * group - 1)
            out = output[b, pair // group, kv_head * group + pair % group]
            for d in range(dim):
                out[d] = sums[i, d] / total[i] if begin[i] < end[i] else np.float32(0)
    return 0


def _handler(frame):
    return call.handle(frame, _part_address())
