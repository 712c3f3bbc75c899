"""Sums in Triton whose order depends on the length of a row alone (`engine.exact = true`)."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.row_sum.reference import row_sum as reference

_BLOCK = 8192


def row_sum(x: jax.Array) -> jax.Array:
    """See `reference.row_sum`."""
    *rows, length = x.shape
    if not x.size:
        return reference(x)
    block = min(max(triton.next_power_of_2(length), 16), _BLOCK)
    (sums,) = triton_call(
        _kernel,
        (x,),
        [jax.ShapeDtypeStruct(tuple(rows), jnp.float32)],
        grid=(math.prod(rows),),
        num_warps=8 if block == _BLOCK else 1,
        length=length,
        block=block,
    )
    return sums


@triton.jit
def _kernel(x, sums, length: tl.constexpr, block: tl.constexpr):
    row = x + tl.program_id(0).to(tl.int64) * length
    index = tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, length, block):
        total += tl.load(row + start + index, mask=start + index < length, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
