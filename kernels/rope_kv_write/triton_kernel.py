"""Rotation and cache write as one Triton kernel."""

import jax
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.coded_cache import MOST_MANTISSA, Cache, CodedCache
from jaxspec_kernels.calls.triton_call import triton_call

_MOST_MANTISSA = tl.constexpr(MOST_MANTISSA)


def rope_kv_write(
    cache: Cache, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[Cache, jax.Array]:
    """See `reference.rope_kv_write`. One program handles one key/value head of one row."""
    batch, rows, heads, parts, head_dim = projected.shape
    group = parts - 2
    queries = jax.ShapeDtypeStruct((batch, rows, heads, group, head_dim), projected.dtype)
    if slots.size == 0:
        return cache, projected[..., :-2, :]
    arrays, tree = jax.tree.flatten(cache)
    is_coded = isinstance(cache, CodedCache)
    *written, rotated = triton_call(
        _rope_kv_write_coded_kernel if is_coded else _rope_kv_write_kernel,
        (*arrays, slots, projected, cos, sin),
        [queries],
        in_place=len(arrays),
        grid=(slots.size, heads),
        num_warps=1 if parts * head_dim <= 512 else 4,
        fuses=False,  # both kernels rotate to the same bits
        heads=heads,
        group=group,
        page_size=cache.shape[3],
        half=head_dim // 2,
        block_parts=triton.next_power_of_2(parts),
        block_half=triton.next_power_of_2(head_dim // 2),
    )
    return jax.tree.unflatten(tree, written), rotated


@triton.jit
def _rope_kv_write_kernel(
    cache,
    slots,
    projected,
    cos,
    sin,
    queries,
    heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,
    block_parts: tl.constexpr,
    block_half: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.arange(0, block_parts)[:, None]
    new_left, new_right = _rotated(
        projected, cos, sin, queries, row, head, part, heads, group, half, block_half
    )
    place = _place(slots, row, head, part, heads, group, page_size)
    dim = tl.arange(0, block_half)[None, :]
    target = cache + place * 2 * half + dim
    mask = (part >= group) & (part < group + 2) & (dim < half)
    dtype = cache.dtype.element_ty
    tl.store(target, new_left.to(dtype), mask=mask)
    tl.store(target + half, new_right.to(dtype), mask=mask)


@triton.jit
def _rope_kv_write_coded_kernel(
    codes,
    exponents,
    slots,
    projected,
    cos,
    sin,
    queries,
    heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,
    block_parts: tl.constexpr,
    block_half: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.arange(0, block_parts)[:, None]
    new_left, new_right = _rotated(
        projected, cos, sin, queries, row, head, part, heads, group, half, block_half
    )
    left, right = new_left.to(tl.float32), new_right.to(tl.float32)
    left_size, right_size = tl.abs(left), tl.abs(right)
    left_is_finite, right_is_finite = left_size < float("inf"), right_size < float("inf")
    sizes = tl.maximum(tl.where(left_is_finite, left_size, 0.0), tl.where(right_is_finite, right_size, 0.0))
    largest = tl.max(sizes, 1)[:, None].to(tl.int32, bitcast=True)
    exponent = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > _MOST_MANTISSA).to(tl.int32)
    exponent = tl.maximum(exponent, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    nan = float("nan")
    place = _place(slots, row, head, part, heads, group, page_size)
    in_cache = (part >= group) & (part < group + 2)
    tl.store(exponents + place, exponent.to(tl.uint8), mask=in_cache)
    dim = tl.arange(0, block_half)[None, :]
    target = codes + place * 2 * half + dim
    mask = in_cache & (dim < half)
    dtype = codes.dtype.element_ty
    tl.store(target, tl.where(left_is_finite, left * inverse, nan).to(dtype), mask=mask)
    tl.store(target + half, tl.where(right_is_finite, right * inverse, nan).to(dtype), mask=mask)


@triton.jit
def _rotated(
    projected,
    cos,
    sin,
    queries,
    row,
    head,
    part,
    heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    block_half: tl.constexpr,
):
    """Writes the rotated queries of one head of one row; returns the halves of all its parts."""
    dim = tl.arange(0, block_half)
    in_half = dim < half
    row_cos = tl.load(cos + row * half + dim, mask=in_half, other=0.0)[None, :]
    row_sin = tl.load(sin + row * half + dim, mask=in_half, other=0.0)[None, :]
    dim, in_half = dim[None, :], in_half[None, :]

    source = projected + ((row * heads + head) * (group + 2) + part) * 2 * half + dim
    mask = (part < group + 2) & in_half
    left = tl.load(source, mask=mask, other=0.0)
    right = tl.load(source + half, mask=mask, other=0.0)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    is_value = part == group + 1
    new_left = tl.where(is_value, left, (wide_left * row_cos - wide_right * row_sin).to(left.dtype))
    new_right = tl.where(is_value, right, (wide_right * row_cos + wide_left * row_sin).to(left.dtype))

    target = queries + ((row * heads + head) * group + part) * 2 * half + dim
    mask = (part < group) & in_half
    tl.store(target, new_left, mask=mask)
    tl.store(target + half, new_right, mask=mask)
    return new_left, new_right


@triton.jit
def _place(slots, row, head, part, heads: tl.constexpr, group: tl.constexpr, page_size: tl.constexpr):
    """Where the cache holds the key and the value of a head of a row, in rows."""
    slot = tl.load(slots + row)
    # 64 bits, because a cache may have more than 2^31 elements.
    page = (slot // page_size).to(tl.int64)
    return ((page * heads + head) * 2 + part - group) * page_size + slot % page_size
