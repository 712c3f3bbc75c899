"""Product and sum in one Triton kernel, for the few rows of a decoding step."""

import math

import jax
import triton
import triton.language as tl
from jaxspec_kernels.matmul_add import reference
from jaxspec_kernels.small_matmul import pick_tiles
from jaxspec_kernels.triton_call import triton_call


def matmul_add(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> jax.Array:
    """See `reference.matmul_add`.

    What is not bound by launches and memory (float32, many rows) is left to XLA.
    """
    width, outputs = kernel.shape
    rows = math.prod(x.shape[:-1])
    tiles = pick_tiles(rows, width, outputs, x.dtype)
    if tiles is None:
        return reference.matmul_add(x, kernel, residual)
    (y,) = triton_call(
        _matmul_add,
        (x, kernel, residual),
        [jax.ShapeDtypeStruct(residual.shape, x.dtype)],
        grid=(triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        rows=rows,
        width=width,
        columns=outputs,
        block_rows=tiles.rows,
        block_width=tiles.width,
        block_outputs=tiles.outputs,
        slices=tiles.warps,
    )
    return y


@triton.jit
def _matmul_add(
    x,
    weight,
    residual,
    y,
    rows: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
    block_outputs: tl.constexpr,
    slices: tl.constexpr,
):
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_rows, in_columns = row < rows, column < columns
    # Every warp sums a slice of its own: one chain of products would be as long as all of them.
    depth: tl.constexpr = block_width // slices
    offset = tl.arange(0, slices)[:, None] * depth + tl.arange(0, depth)[None, :]
    sums = tl.zeros((slices, block_rows, block_outputs), tl.float32)
    for start in range(0, width, block_width):
        k = start + offset
        in_width = k < width
        at = x + row[None, :, None] * width + k[:, None, :]
        part = tl.load(at, mask=in_rows[None, :, None] & in_width[:, None, :], other=0.0)
        at = weight + k[:, :, None] * columns + column[None, None, :]
        mask = in_width[:, :, None] & in_columns[None, None, :]
        sums = tl.dot(part, tl.load(at, mask=mask, other=0.0), sums)
    dtype = y.dtype.element_ty
    product = tl.sum(sums, 0).to(dtype).to(tl.float32)
    at = row[:, None] * columns + column[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32) + product
    tl.store(y + at, added.to(dtype), mask=mask)
