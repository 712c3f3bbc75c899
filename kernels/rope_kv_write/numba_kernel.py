"""Rotation and cache write as one loop on a CPU, where XLA makes three operations of it."""

import jax
import jax.numpy as jnp
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.rope_kv_write.reference import rope_kv_write as reference
from numba import carray

_FASTMATH = {"contract", "nsz"}
_NAME = "jaxspec_rope_kv_write"
_part_address = call.address_of(_NAME)


def rope_kv_write(
    cache: jax.Array, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `reference.rope_kv_write`, which computes what this kernel is not for."""
    if not (cache.dtype == projected.dtype == jnp.float32 and slots.size):
        return reference(cache, slots, projected, cos, sin)
    batch, rows, heads, parts, head_dim = projected.shape
    shapes = (cache.shape, (batch, rows, heads, parts - 2, head_dim))
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kernel = jax.ffi.ffi_call(_target(), results, input_output_aliases={0: 0})
    cache, queries = kernel(cache, slots, projected, cos, sin)
    return cache, queries


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    call.register(_NAME, _part, _handler, fastmath=_FASTMATH)
    return _NAME


def _part(frame, part, parts):
    """Writes in the order of the rows: one thread, for several rows may name one slot of page 0."""
    cache_, projected_ = call.result(frame, 0), call.argument(frame, 2)
    batch, rows, heads, columns, dim = call.shape(projected_, 5)
    page_size, count, group, half = call.shape(cache_, 5)[3], batch * rows, columns - 2, dim // 2
    cache = carray(call.floats(cache_), (call.shape(cache_, 5)[0], heads, 2, page_size, dim))
    slots = carray(call.integers(call.argument(frame, 1)), count)
    projected = carray(call.floats(projected_), (count, heads, columns, dim))
    cosines = carray(call.floats(call.argument(frame, 3)), (count, half))
    sines = carray(call.floats(call.argument(frame, 4)), (count, half))
    queries = carray(call.floats(call.result(frame, 1)), (count, heads, group, dim))
    for i in range(count):
        page, offset = slots[i] // page_size, slots[i] % page_size
        cos, sin = cosines[i], sines[i]
        for head in range(heads):
            for column in range(group + 1):
                left, right = projected[i, head, column, :half], projected[i, head, column, half:]
                out = queries[i, head, column] if column < group else cache[page, head, 0, offset]
                for d in range(half):
                    out[d] = left[d] * cos[d] - right[d] * sin[d]
                    out[half + d] = right[d] * cos[d] + left[d] * sin[d]
            value, kept = projected[i, head, group + 1], cache[page, head, 1, offset]
            for d in range(dim):
                kept[d] = value[d]
    return 0


def _handler(frame):
    return call.handle_alone(frame, _part_address())
