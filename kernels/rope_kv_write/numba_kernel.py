"""Rotation and cache write as one loop on a CPU, where XLA makes three operations of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.rope_kv_write.reference import rope_kv_write as reference

_FASTMATH = {"contract", "nsz"}
_POINTERS = {"float32": (call.floats, np.float32), "float16": (call.halves, call.half_bits)}
"""A pointer to a cache of this dtype, and what it stores of a float32."""


def rope_kv_write(
    cache: jax.Array, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `reference.rope_kv_write`, which computes other cases."""
    if not (str(cache.dtype) in _POINTERS and projected.dtype == jnp.float32 and slots.size):
        return reference(cache, slots, projected, cos, sin)
    batch, rows, heads, parts, head_dim = projected.shape
    results = [
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        jax.ShapeDtypeStruct((batch, rows, heads, parts - 2, head_dim), jnp.float32),
    ]
    kernel = jax.ffi.ffi_call(_target(str(cache.dtype)), results, input_output_aliases={0: 0})
    cache, queries = kernel(cache, slots, projected, cos, sin)
    return cache, queries


@call.once
def _target(dtype: str) -> str:
    """Compiles and registers the kernel for a cache of this dtype; returns its name."""
    pointer, kept = _POINTERS[dtype]

    # Rows are written in their order, by one thread, for several may name one slot of page 0.
    def kernel(frame, part, parts):
        cache_, projected_ = call.result(frame, 0), call.argument(frame, 2)
        batch, rows, heads, columns, dim = call.shape(projected_, 5)
        page_size, count, group, half = call.shape(cache_, 5)[3], batch * rows, columns - 2, dim // 2
        cache, slots = pointer(cache_), call.integers(call.argument(frame, 1))
        projected, queries = call.floats(projected_), call.floats(call.result(frame, 1))
        cosines, sines = call.floats(call.argument(frame, 3)), call.floats(call.argument(frame, 4))
        for i in range(count):
            page, offset = slots[i] // page_size, slots[i] % page_size
            angle = half * i
            for head in range(heads):
                left = dim * columns * (heads * i + head)
                right, out = left + half, dim * group * (heads * i + head)
                for _ in range(group):
                    for d in range(half):
                        x, y = projected[left + d], projected[right + d]
                        cos, sin = cosines[angle + d], sines[angle + d]
                        queries[out + d] = x * cos - y * sin
                        queries[out + half + d] = y * cos + x * sin
                    left, right, out = left + dim, right + dim, out + dim
                key = dim * (page_size * 2 * (heads * page + head) + offset)
                for d in range(half):
                    x, y = projected[left + d], projected[right + d]
                    cos, sin = cosines[angle + d], sines[angle + d]
                    cache[key + d] = kept(x * cos - y * sin)
                    cache[key + half + d] = kept(y * cos + x * sin)
                value = key + dim * page_size
                for d in range(dim):
                    cache[value + d] = kept(projected[left + dim + d])
        return 0

    return call.register(f"jaxspec_rope_kv_write_{dtype}", kernel, fastmath=_FASTMATH, alone=True)
