"""The choice of entries on a CPU: scores, then a search for the least score that is kept."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.attention_parts.attention_code import copying, lanes_of, scores_code
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT
from jaxspec_kernels.choose_entries.reference import choose_entries as reference

_TILE = 16
"""Entries whose scores are computed together."""
_INFINITY = 0x7F800000


def choose_entries(
    queries: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    entry_slots: jax.Array,
    num_entries: jax.Array,
    *,
    keep: int,
) -> jax.Array:
    """See `jaxspec_kernels.choose_entries.reference`, which is called for cases that the kernel lacks."""
    is_float = queries.dtype == jnp.float32 and keys.dtype in (jnp.float32, jnp.float16)
    if not (is_float and queries.size and keep):
        return reference(queries, weights, keys, entry_slots, num_entries, keep=keep)
    target = _registered(queries.shape[3], keys.dtype == jnp.float16)
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((*queries.shape[:2], keep), jnp.int32))(
        queries, weights.astype(jnp.float32), keys, entry_slots, num_entries
    )


@call.njit
def _reached(ranks, count, least):
    """How many of the first `count` ranks are at least `least`."""
    found = 0
    for j in range(count):
        found += ranks[j] >= least
    return found


@call.once
def _registered(dim: int, is_half: bool) -> str:
    """Compiles and registers a kernel; returns its name.

    Args:
      dim: the width of a head.
      is_half: whether the keys are float16.
    """
    lanes = lanes_of(dim)
    row_bytes, held_bytes = 4 * dim, (2 if is_half else 4) * dim
    products, copy = scores_code(_TILE, lanes, dim, FLOAT), copying(lanes, dim, is_half)

    def kernel(frame, part, parts):
        queries_, weights = call.argument(frame, 0), call.floats(call.argument(frame, 1))
        batch, rows, heads, _ = call.shape(queries_, 4)
        width = call.shape(call.argument(frame, 3), 2)[1]
        keep = call.shape(call.result(frame, 0), 3)[2]
        queries, keys = call.address(queries_), call.address(call.argument(frame, 2))
        listed, counts = call.integers(call.argument(frame, 3)), call.integers(call.argument(frame, 4))
        chosen = call.integers(call.result(frame, 0))
        scratch = call.allocate(row_bytes * _TILE + 4 * _TILE + 4 * (width + _TILE))
        by_head_at = scratch + row_bytes * _TILE
        scores_at = by_head_at + 4 * _TILE
        by_head, scores, ranks = (
            call.floats_at(by_head_at),
            call.floats_at(scores_at),
            call.integers_at(scores_at),
        )
        units = batch * rows
        for row in range(units * part // parts, units * (part + 1) // parts):
            count, slots, out = counts[row], width * (row // rows), keep * row
            if count <= keep:
                for j in range(keep):
                    chosen[out + j] = listed[slots + j]
                continue
            for left in range(0, count, _TILE):
                for j in range(min(_TILE, count - left)):
                    copy(keys + held_bytes * listed[slots + left + j], scratch + row_bytes * j)
                for j in range(_TILE):
                    scores[left + j] = np.float32(0)
                for head in range(heads):
                    of_head = heads * row + head
                    products(queries + row_bytes * of_head, scratch, by_head_at)
                    weight = weights[of_head]
                    for j in range(_TILE):
                        scores[left + j] += weight * max(by_head[j], np.float32(0))
            # Integers in the order of the scores: zeros are equal, NaN is above all.
            low, high = np.int64(_INFINITY) + 1, np.int64(-_INFINITY) - 1
            for j in range(count):
                bits = ranks[j]
                magnitude = bits & 0x7FFFFFFF
                rank = min(magnitude, _INFINITY + 1)
                if bits < 0 and rank <= _INFINITY:
                    rank = -rank
                ranks[j] = rank
                low, high = min(low, np.int64(rank)), max(high, np.int64(rank))
            high += 1
            # At least `keep` entries, `num_low`, are at or above `low`, and fewer at or above `high`.
            num_low, num_high = count, 0
            while num_low > keep and high - low > 1:
                middle = low + (high - low) // 2
                found = _reached(ranks, count, np.int32(middle))
                if found >= keep:
                    low, num_low = middle, found
                else:
                    high, num_high = middle, found
            # Those in the interval have equal scores, or all of them are kept.
            wanted = keep - num_high
            for j in range(count):
                if ranks[j] >= low:
                    if ranks[j] < high:
                        if wanted == 0:
                            continue
                        wanted -= 1
                    chosen[out] = listed[slots + j]
                    out += 1
        call.release(scratch)
        return 0

    return call.register(f"jaxspec_choose_entries_{lanes}_{dim}{'_half' * is_half}", kernel, fastmath=set())
