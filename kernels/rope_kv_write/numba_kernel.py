"""Rotation and cache write as one loop on a CPU, where XLA makes three operations of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.attention_parts.coded_cache import MOST_MANTISSA, Cache, CodedCache
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.rope_kv_write.reference import rope_kv_write as reference

_FASTMATH = {"contract", "nsz"}
_POINTERS = {"float32": (call.floats, np.float32), "float16": (call.halves, call.half_bits)}
"""A pointer to a cache of this dtype, and what it stores of a float32."""


def rope_kv_write(
    cache: Cache, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[Cache, jax.Array]:
    """See `reference.rope_kv_write`, which computes other cases."""
    is_coded = isinstance(cache, CodedCache)
    if not ((is_coded or str(cache.dtype) in _POINTERS) and projected.dtype == jnp.float32 and slots.size):
        return reference(cache, slots, projected, cos, sin)
    batch, rows, heads, parts, head_dim = projected.shape
    arrays, tree = jax.tree.flatten(cache)
    results = [
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
        jax.ShapeDtypeStruct((batch, rows, heads, parts - 2, head_dim), jnp.float32),
    ]
    aliases = {i: i for i in range(len(arrays))}
    kernel = jax.ffi.ffi_call(_target(str(cache.dtype)), results, input_output_aliases=aliases)
    *written, queries = kernel(*arrays, slots, projected, cos, sin)
    return jax.tree.unflatten(tree, written), queries


@call.once
def _target(dtype: str) -> str:
    """Compiles and registers the kernel for a cache of this dtype; returns its name."""
    is_coded = dtype not in _POINTERS
    put = _put_codes if is_coded else _putting(*_POINTERS[dtype])
    # A cache in codes is two arrays.
    others = 2 if is_coded else 1

    # Rows are written in their order, by one thread, for several may name one slot of page 0.
    def kernel(frame, part, parts):
        cache_, projected_ = call.result(frame, 0), call.argument(frame, others + 1)
        batch, rows, heads, columns, dim = call.shape(projected_, 5)
        page_size, count, group, half = call.shape(cache_, 5)[3], batch * rows, columns - 2, dim // 2
        exponents_, slots = call.result(frame, others - 1), call.integers(call.argument(frame, others))
        projected, queries = call.floats(projected_), call.floats(call.result(frame, others))
        cosines = call.floats(call.argument(frame, others + 2))
        sines = call.floats(call.argument(frame, others + 3))
        # A row, and one more number.
        row = call.allocate(4 * (dim + 1))
        numbers = call.floats_at(row)
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
                for d in range(half):
                    x, y = projected[left + d], projected[right + d]
                    cos, sin = cosines[angle + d], sines[angle + d]
                    numbers[d] = x * cos - y * sin
                    numbers[half + d] = y * cos + x * sin
                key = page_size * 2 * (heads * page + head) + offset
                put(cache_, exponents_, key, row, dim)
                for d in range(dim):
                    numbers[d] = projected[left + dim + d]
                put(cache_, exponents_, key + page_size, row, dim)
        call.release(row)
        return 0

    return call.register(f"jaxspec_rope_kv_write_{dtype}", kernel, fastmath=_FASTMATH, alone=True)


def _putting(pointer: Any, kept: Any) -> Any:
    """A function for kernels that writes a row of float32, given by its address, to a place of a cache."""

    @call.inlined
    def put(cache, exponents, place, row, dim):
        held, numbers = pointer(cache), call.floats_at(row)
        for d in range(dim):
            held[dim * place + d] = kept(numbers[d])

    return put


@call.njit
def _put_codes(codes_, exponents_, place, row, dim):
    """`put` for a `CodedCache`: what `encode` gives, by the bits of float32. The row is overwritten."""
    codes, exponents = call.bytes_of(codes_), call.bytes_of(exponents_)
    numbers, bits = call.floats_at(row), call.integers_at(row)
    largest = 0
    for d in range(dim):
        magnitude = bits[d] & 0x7FFFFFFF
        if largest < magnitude < 0x7F800000:
            largest = magnitude
    exponent = max((largest >> 23) - 8 + ((largest & 0x7FFFFF) > MOST_MANTISSA), 1)
    exponents[place] = exponent
    bits[dim] = (254 - exponent) << 23
    inverse = numbers[dim]
    for d in range(dim):
        sign = (bits[d] >> 24) & 0x80
        if (bits[d] & 0x7FFFFFFF) >= 0x7F800000:
            code = 0x7F
        else:
            numbers[d] = abs(numbers[d]) * inverse
            if bits[d] >= 121 << 23:
                # At least 2 ** -6: three bits of the mantissa are left, rounded to even.
                code = ((bits[d] + 0x7FFFF + ((bits[d] >> 20) & 1)) >> 20) - (120 << 3)
            else:
                # Numbers between 2 ** 14 and 2 ** 15 are multiples of 2 ** -9, as those below 2 ** -6 are.
                numbers[d] += np.float32(16384)
                code = bits[d] - (141 << 23)
        codes[dim * place + d] = code | sign
