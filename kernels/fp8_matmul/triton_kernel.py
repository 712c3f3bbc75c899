"""Products of rows rounded to FP8 with weights in FP8, on tensor cores for FP8."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxspec_kernels.fp8_matmul.reference import BLOCK, LARGEST
from jaxspec_kernels.fp8_matmul.reference import fp8_matmul as reference
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.triton_call import triton_call

_ROUNDED_ROWS = 16
"""Rows of a program that rounds."""
_BAND = 16
"""Tiles of rows that share a block of outputs while it is in the cache."""


class Tile(NamedTuple):
    """The sizes of a tile, and Triton's launch options for it."""

    block_rows: int
    block_outputs: int
    num_warps: int
    num_stages: int


_TILE = Tile(64, 128, 4, 4)


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames="out_dtype")
def fp8_matmul(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """See `reference.fp8_matmul`, which computes other dtypes."""
    if x.dtype != jnp.bfloat16 or not x.size:
        return reference(x, kernel, out_dtype=out_dtype)
    batch, width, outputs = x.shape[:-1], kernel.width, math.prod(kernel.out_axes)
    rows = math.prod(batch)
    values, factors = triton_call(
        round_kernel,
        (x, rows),
        [
            jax.ShapeDtypeStruct((rows, width), jnp.uint8),
            jax.ShapeDtypeStruct((width // BLOCK, rows), jnp.float32),
        ],
        grid=(triton.cdiv(rows, _ROUNDED_ROWS), width // BLOCK),
        width=width,
        half=BLOCK // 2,
        largest_code=LARGEST,
        block_rows=_ROUNDED_ROWS,
    )
    (y,) = triton_call(
        product_kernel,
        (values, factors, kernel.words, kernel.scale, rows),
        [jax.ShapeDtypeStruct((rows, outputs), jnp.dtype(out_dtype or x.dtype))],
        grid=(triton.cdiv(rows, _TILE.block_rows) * triton.cdiv(outputs, _TILE.block_outputs),),
        width=width,
        out_width=outputs,
        block=BLOCK,
        tile=kernel.words.shape[-2],
        by_group=kernel.columns < width,
        scale_rows=kernel.scale_rows,
        band=_BAND,
        **_TILE._asdict(),
    )
    return y.reshape(*batch, *kernel.out_axes)


@triton.jit
def round_kernel(
    x,
    rows,
    values,
    factors,
    width: tl.constexpr,
    half: tl.constexpr,
    largest_code: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Rounds a block of inputs of some rows.

    The two halves of a block are interleaved, as the two codes of a weight's words are: the bytes of both are
    then operands of tensor cores as they lie in memory.

    Args:
      x: [rows, width].
      values: u8[rows, width], codes of float8_e4m3fn.
      factors: f32[width / block, rows].
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    start = tl.program_id(1) * (2 * half)
    taken = row < rows
    inputs = x + row.to(tl.int64)[:, None] * width + (start + tl.arange(0, half))[None, :]
    x0 = tl.load(inputs, mask=taken[:, None], other=0.0).to(tl.float32)
    x1 = tl.load(inputs + half, mask=taken[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x0), 1), tl.max(tl.abs(x1), 1))
    full = tl.full((block_rows,), largest_code, tl.float32)
    inverse = tl.where(largest > 2.0**-100, tl.div_rn(full, largest), 0.0)[:, None]
    pairs = tl.interleave((x0 * inverse).to(tl.float8e4nv), (x1 * inverse).to(tl.float8e4nv))
    out = values + row.to(tl.int64)[:, None] * width + (start + tl.arange(0, 2 * half))[None, :]
    tl.store(out, pairs.to(tl.uint8, bitcast=True), mask=taken[:, None])
    tl.store(factors + tl.program_id(1).to(tl.int64) * rows + row, tl.div_rn(largest, full), mask=taken)


@triton.jit
def product_kernel(
    x,
    factors,
    words,
    scale,
    rows,
    y,
    width: tl.constexpr,
    out_width: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    by_group: tl.constexpr,
    scale_rows: tl.constexpr,
    band: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Multiplies a tile of rounded rows with a tile of outputs.

    Tensor cores add FP8 products with fewer bits than a float32 has, so their sums are of one block.

    Args:
      x, factors: see `round_kernel`.
      words, scale: of a `CodedWeight`.
      rows: a number, so that programs of different sizes share a compiled kernel.
      y: [rows, out_width], the result.
    """
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (out_width + block_outputs - 1) // block_outputs
    program = tl.program_id(0)
    first = program // (band * column_tiles) * band
    in_band = min(row_tiles - first, band)
    place = program % (band * column_tiles)
    row = (first + place % in_band) * block_rows + tl.arange(0, block_rows)
    column = place // in_band * block_outputs + tl.arange(0, block_outputs)
    index = tl.arange(0, block)
    taken = row < rows
    at = tl.minimum(column, out_width - 1)
    inputs = x.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    inputs += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * width + index[None, :]
    codes = words.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    codes += (
        (at // tile).to(tl.int64)[None, :] * (tile * width) + (at % tile * block)[None, :] + index[:, None]
    )
    factors += tl.minimum(row, rows - 1)
    # Where all outputs of a tile share their scales, a scale is a number.
    scale += (place // in_band * block_outputs if scale_rows % block_outputs == 0 else at) // scale_rows
    groups: tl.constexpr = out_width // scale_rows
    steps: tl.constexpr = width // block
    sums = tl.zeros((block_rows, block_outputs), tl.float32)
    # Factors and scales are loaded a step ahead, because the compiler does not load short vectors ahead.
    next_factor, next_scale = tl.load(factors), tl.load(scale)
    for step in range(steps):
        part = tl.dot(tl.load(inputs), tl.load(codes))
        ahead = tl.minimum(step + 1, steps - 1)
        factor, next_factor = next_factor[:, None], tl.load(factors + ahead.to(tl.int64) * rows)
        if by_group:
            factor *= _of_outputs(next_scale)
            next_scale = tl.load(scale + ahead * groups)
        sums += part * factor
        inputs += block
        codes += tile * block
    if not by_group:
        sums *= _of_outputs(next_scale)
    out = y + row.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=taken[:, None] & (column < out_width)[None, :])


@triton.jit
def _of_outputs(scale):
    """Scales f32[1, outputs], or the one of all outputs."""
    scale = scale.to(tl.float32, bitcast=True)
    return scale[None, :] if len(scale.shape) else scale
