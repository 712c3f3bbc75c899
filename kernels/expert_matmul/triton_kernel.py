"""Products with chosen experts in one Triton kernel that reads each of them once, where it lies."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.expert_matmul import takes
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference
from jaxspec_kernels.triton_call import triton_call


def expert_matmul(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """See `reference.expert_matmul`, to which float32 and more rows are left."""
    rows, width = x.shape
    if not takes(rows, x.dtype) or weights.dtype != x.dtype:
        return reference(x, experts, weights)
    outputs = math.prod(weights.shape[2:])
    # All rows are one tile of the product; those of other experts are zeros in it.
    block_rows = max(16, triton.next_power_of_2(rows))
    block_outputs = 64 if rows <= 32 else 128
    (y,) = triton_call(
        _expert_matmul,
        (x, experts, weights),
        [jax.ShapeDtypeStruct((rows, outputs), jnp.float32)],
        grid=(triton.cdiv(outputs, block_outputs), rows),
        num_warps=4,
        num_stages=4,
        rows=rows,
        width=width,
        columns=outputs,
        block_rows=block_rows,
        block_width=64,
        block_outputs=block_outputs,
    )
    return y.reshape(rows, *weights.shape[2:])


@triton.jit
def _expert_matmul(
    x,
    experts,
    weights,
    y,
    rows: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
    block_outputs: tl.constexpr,
):
    mine = tl.program_id(1)
    expert = tl.load(experts + mine)
    row = tl.arange(0, block_rows)
    same = tl.load(experts + row, mask=row < rows, other=-1) == expert
    # The first row of an expert does the work of all of its rows.
    if tl.sum((same & (row < mine)).to(tl.int32), 0) == 0:
        column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        in_columns = column < columns
        base = weights + expert.to(tl.int64) * width * columns
        sums = tl.zeros((block_rows, block_outputs), tl.float32)
        for start in range(0, width, block_width):
            k = start + tl.arange(0, block_width)
            in_width = k < width
            part = tl.load(
                x + row[:, None] * width + k[None, :], mask=same[:, None] & in_width[None, :], other=0.0
            )
            tile = tl.load(
                base + k[:, None] * columns + column[None, :],
                mask=in_width[:, None] & in_columns[None, :],
                other=0.0,
            )
            sums = tl.dot(part, tile, sums)
        tl.store(y + row[:, None] * columns + column[None, :], sums, mask=same[:, None] & in_columns[None, :])
