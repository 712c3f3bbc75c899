"""Rotation and cache write as one Triton kernel."""

import jax
import triton
import triton.language as tl
from jaxspec_kernels.triton_call import triton_call


def rope_kv_write(
    cache: jax.Array, slots: jax.Array, projected: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `reference.rope_kv_write`. One program handles one key/value head of one row."""
    batch, rows, heads, parts, head_dim = projected.shape
    group = parts - 2
    queries = jax.ShapeDtypeStruct((batch, rows, heads, group, head_dim), projected.dtype)
    if slots.size == 0:
        return cache, projected[..., :-2, :]
    cache, rotated = triton_call(
        _rope_kv_write_kernel,
        (cache, slots, projected, cos, sin),
        [queries],
        in_place=1,
        grid=(slots.size, heads),
        num_warps=1 if parts * head_dim <= 512 else 4,
        heads=heads,
        group=group,
        page_size=cache.shape[3],
        half=head_dim // 2,
        block_parts=triton.next_power_of_2(parts),
        block_half=triton.next_power_of_2(head_dim // 2),
    )
    return cache, rotated


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
    row, head = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, block_parts)[:, None]
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

    slot = tl.load(slots + row)
    # 64 bits, because a cache may have more than 2^31 elements.
    page = (slot // page_size).to(tl.int64)
    offset = ((page * heads + head) * 2 + part - group) * page_size + slot % page_size
    target = cache + offset * 2 * half + dim
    mask = (part >= group) & (part < group + 2) & in_half
    dtype = cache.dtype.element_ty
    tl.store(target, new_left.to(dtype), mask=mask)
    tl.store(target + half, new_right.to(dtype), mask=mask)
