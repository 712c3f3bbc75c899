"""Norm and product in one Triton kernel, for the few rows of a decoding step."""

import math

import jax
import triton
import triton.language as tl
from jaxspec_kernels.rms_matmul import reference
from jaxspec_kernels.small_matmul import pick_tiles
from jaxspec_kernels.triton_call import triton_call


def rms_matmul(
    x: jax.Array, scale: jax.Array, kernel: jax.Array, *, eps: float, gated: bool = False
) -> jax.Array:
    """See `reference.rms_matmul`.

    One program reads some columns of the weight and all of x, whose norm is applied to the sums. What is
    not bound by launches and memory (float32, many rows) is left to XLA.
    """
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    outs = kernel.shape[2:] if gated else kernel.shape[1:]
    outputs = math.prod(outs)
    tiles = pick_tiles(rows, width, outputs, x.dtype, weights=2 if gated else 1)
    if tiles is None:
        return reference.rms_matmul(x, scale, kernel, eps=eps, gated=gated)
    (y,) = triton_call(
        _rms_matmul,
        (x, scale, kernel),
        [jax.ShapeDtypeStruct((rows, outputs), x.dtype)],
        grid=(triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        rows=rows,
        width=width,
        columns=outputs,
        eps=eps,
        gated=gated,
        block_rows=tiles.rows,
        block_width=tiles.width,
        block_outputs=tiles.outputs,
        slices=tiles.warps,
    )
    return y.reshape(*x.shape[:-1], *outs)


@triton.jit
def _rms_matmul(
    x,
    scale,
    weight,
    y,
    rows: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    eps: tl.constexpr,
    gated: tl.constexpr,
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
    squares = tl.zeros((slices, block_rows), tl.float32)
    sums = tl.zeros((slices, block_rows, block_outputs), tl.float32)
    up_sums = tl.zeros((slices, block_rows, block_outputs), tl.float32)
    stride: tl.constexpr = 2 * columns if gated else columns
    for start in range(0, width, block_width):
        k = start + offset
        in_width = k < width
        at = x + row[None, :, None] * width + k[:, None, :]
        part = tl.load(at, mask=in_rows[None, :, None] & in_width[:, None, :], other=0.0).to(tl.float32)
        squares += tl.sum(part * part, 2)
        part = part * tl.load(scale + k, mask=in_width, other=0.0).to(tl.float32)[:, None, :]
        part = part.to(x.dtype.element_ty)
        at = weight + k[:, :, None] * stride + column[None, None, :]
        mask = in_width[:, :, None] & in_columns[None, None, :]
        sums = tl.dot(part, tl.load(at, mask=mask, other=0.0), sums)
        if gated:
            up_sums = tl.dot(part, tl.load(at + columns, mask=mask, other=0.0), up_sums)
    norm = tl.rsqrt(tl.sum(squares, 0) / width + eps)[:, None]
    result = tl.sum(sums, 0) * norm
    if gated:
        result = result * tl.sigmoid(result) * (tl.sum(up_sums, 0) * norm)
    at = y + row[:, None] * columns + column[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
