"""Sparse attention, over listed slots on a CPU.

The vectors of a tile are gathered once for all heads of a row. A row's sums do not depend on the other rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.attention_parts.attention_code import (
    copying,
    lanes_of,
    scores_code,
    softmax_code,
    values_code,
)
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT
from jaxspec_kernels.sparse_attention.reference import sparse_attention as reference

_TILE = 16
"""Slots whose scores are computed together."""
_PIECES = 2
"""Pieces of work for each thread, if there are so many heads."""


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
    """See `jaxspec_kernels.sparse_attention.reference`, which is called for cases that the kernel lacks."""
    dtypes = {x.dtype for x in (cache, entries) if x is not None}
    is_float = queries.dtype == jnp.float32 and dtypes in ({np.dtype("float32")}, {np.dtype("float16")})
    if not (is_float and queries.size):
        lists = window_slots, window_lengths, entries, entry_slots, num_entries
        return reference(queries, cache, *lists, sinks, scale=scale)
    if entries is None:
        entries, num_entries = cache, jnp.zeros_like(window_lengths)
    target = _registered(queries.shape[3], cache.dtype == jnp.float16)
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(queries.shape, jnp.float32))(
        queries,
        *(cache, window_slots, window_lengths),
        *(entries, entry_slots, num_entries),
        sinks.astype(jnp.float32),
        np.array([scale], np.float32),
    )


@call.once
def _registered(dim: int, is_half: bool) -> str:
    """Compiles and registers a kernel; returns its name.

    Args:
      dim: the width of a head.
      is_half: whether the caches are float16.
    """
    lanes = lanes_of(dim)
    # Bytes of a vector in float32, and as a cache holds it.
    row_bytes, held_bytes = 4 * dim, (2 if is_half else 4) * dim
    # As many heads as there are registers for their sums.
    joined = 4 if lanes == 16 else 2
    scores, softmax = scores_code(_TILE, lanes, dim, FLOAT), softmax_code(lanes)
    add, add_joined = values_code(lanes, dim, 1, FLOAT), values_code(lanes, dim, joined, FLOAT)
    copy = copying(lanes, dim, is_half)

    def kernel(frame, part, parts):
        queries_, output_ = call.argument(frame, 0), call.result(frame, 0)
        batch, rows, heads, _ = call.shape(queries_, 4)
        width = call.shape(call.argument(frame, 2), 3)[2]
        _, lists, most = call.shape(call.argument(frame, 5), 3)
        queries, output = call.floats(queries_), call.floats(output_)
        cache, entries = call.address(call.argument(frame, 1)), call.address(call.argument(frame, 4))
        window_slots, lengths = call.integers(call.argument(frame, 2)), call.integers(call.argument(frame, 3))
        entry_slots, counts = call.integers(call.argument(frame, 5)), call.integers(call.argument(frame, 6))
        sinks, scale = call.floats(call.argument(frame, 7)), call.floats(call.argument(frame, 8))[0]
        blocks = max(1, min(heads, _PIECES * parts // (batch * rows)))
        together = -(-heads // blocks)
        # A sink stands behind the last score.
        padded = -(-(width + most + 1) // _TILE) * _TILE
        scratch = call.allocate(row_bytes * (2 * together + _TILE) + 4 * padded * together)
        sums_at = scratch + row_bytes * together
        tile, weights_at = sums_at + row_bytes * together, sums_at + row_bytes * (together + _TILE)
        query, sums, weights = call.floats_at(scratch), call.floats_at(sums_at), call.floats_at(weights_at)
        units = batch * rows * blocks
        for unit in range(units * part // parts, units * (part + 1) // parts):
            row, block = unit // blocks, unit % blocks
            first = heads * block // blocks
            heads_here = heads * (block + 1) // blocks - first
            of_row = dim * (heads * row + first)
            for i in range(dim * heads_here):
                query[i] = queries[of_row + i] * scale
                sums[i] = np.float32(0)
            window = lengths[row]
            seen = window + counts[row]
            of_window = width * row
            of_entries = most * (row if lists == rows else row // rows) - window
            for is_value in range(2):
                for left in range(0, seen, _TILE):
                    count = min(_TILE, seen - left)
                    # A single tile is still there.
                    if not is_value or seen > _TILE:
                        for j in range(count):
                            at = left + j
                            if at < window:
                                copy(cache + held_bytes * window_slots[of_window + at], tile + row_bytes * j)
                            else:
                                copy(
                                    entries + held_bytes * entry_slots[of_entries + at], tile + row_bytes * j
                                )
                    i = 0
                    if is_value:
                        while i + joined <= heads_here:
                            of_heads = weights_at + 4 * (padded * i + left)
                            add_joined(of_heads, 4 * padded, tile, count, sums_at + row_bytes * i)
                            i += joined
                        while i < heads_here:
                            of_head = weights_at + 4 * (padded * i + left)
                            add(of_head, 0, tile, count, sums_at + row_bytes * i)
                            i += 1
                    else:
                        while i < heads_here:
                            scores(scratch + row_bytes * i, tile, weights_at + 4 * (padded * i + left))
                            i += 1
                if not is_value:
                    for i in range(heads_here):
                        weights[padded * i + seen] = sinks[first + i]
                        # The total is kept where the sink was, which has no value.
                        total = softmax(weights_at + 4 * padded * i, 0, seen + 1)
                        weights[padded * i + seen] = total
            for i in range(heads_here):
                inverse = np.float32(1) / weights[padded * i + seen]
                for d in range(dim):
                    output[of_row + dim * i + d] = sums[dim * i + d] * inverse
        call.release(scratch)
        return 0

    name = f"jaxspec_sparse_attention_{lanes}_{dim}{'_half' * is_half}"
    return call.register(name, kernel, fastmath=set())
