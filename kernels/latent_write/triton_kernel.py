"""The write of latents as one Triton kernel."""

import jax
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call


def latent_write(cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """See `reference.latent_write`. One program copies one row."""
    if slots.size == 0:
        return cache
    size = cache.shape[-1]
    (cache,) = triton_call(
        _latent_write_kernel,
        (cache, slots, rows),
        in_place=1,
        grid=(slots.size,),
        num_warps=1 if size <= 256 else 4,
        size=size,
        block_size=triton.next_power_of_2(size),
    )
    return cache


@triton.jit
def _latent_write_kernel(cache, slots, rows, size: tl.constexpr, block_size: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block_size)
    mask = at < size
    # 64 bits, because a cache may have more than 2^31 elements. A slot is the index of a row of the cache.
    slot = tl.load(slots + row).to(tl.int64)
    value = tl.load(rows + row * size + at, mask=mask)
    tl.store(cache + slot * size + at, value.to(cache.dtype.element_ty), mask=mask)
