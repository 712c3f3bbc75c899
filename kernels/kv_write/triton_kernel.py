"""The cache write as one Triton kernel."""

import jax
import triton
import triton.language as tl
from jaxspec_kernels.triton_call import triton_call


def kv_write(cache: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """See `reference.kv_write`. One program copies the keys and values of one row."""
    if slots.size == 0:
        return cache
    _, heads, _, page_size, head_dim = cache.shape
    (cache,) = triton_call(
        _kv_write_kernel,
        (cache, slots, keys, values),
        in_place=1,
        grid=(slots.size,),
        num_warps=1 if heads * head_dim <= 256 else 4,
        heads=heads,
        page_size=page_size,
        head_dim=head_dim,
        block_heads=triton.next_power_of_2(heads),
        block_dim=triton.next_power_of_2(head_dim),
    )
    return cache


@triton.jit
def _kv_write_kernel(
    cache,
    slots,
    keys,
    values,
    heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    head = tl.arange(0, block_heads)[:, None]
    dim = tl.arange(0, block_dim)[None, :]
    mask = (head < heads) & (dim < head_dim)
    source = (row * heads + head) * head_dim + dim
    # 64 bits, because a cache may have more than 2^31 elements.
    page = (slot // page_size).to(tl.int64)
    target = ((page * heads + head) * 2 * page_size + slot % page_size) * head_dim + dim
    dtype = cache.dtype.element_ty
    tl.store(cache + target, tl.load(keys + source, mask=mask).to(dtype), mask=mask)
    tl.store(cache + target + page_size * head_dim, tl.load(values + source, mask=mask).to(dtype), mask=mask)
