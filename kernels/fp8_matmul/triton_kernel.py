"""Products of rows in FP8 with weights in FP8 on tensor cores for FP8 (`engine.packed = true`)."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.fp8_matmul.reference import BLOCK, LARGEST, SCALED_EXPONENT, SMALLEST, has_output_scales
from jaxspec_kernels.fp8_matmul.reference import fp8_matmul as reference
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight

_BAND = 16
"""Tiles of rows that share a block of outputs while it is in the cache."""
_PROGRAMS = 160
"""Programs that occupy a GPU of some 130 multiprocessors."""
_MOST_SECTIONS = 4
_SPLIT_BLOCKS = 16
"""Blocks of inputs that are split at once."""
_TILE: dict[str, Any] = {"block_rows": 64, "block_outputs": 128, "num_warps": 4, "num_stages": 4}
"""The fastest of seven for 64 to 4,096 rows and the four products of a layer of Llama-3-8B, on an H200."""


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames=("terms", "out_dtype"))
def fp8_matmul(
    x: jax.Array, kernel: CodedWeight, *, terms: int = 1, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """See `reference.fp8_matmul`, which computes other dtypes."""
    if x.dtype != jnp.bfloat16 or not x.size:
        return reference(x, kernel, terms=terms, out_dtype=out_dtype)
    values, factors = split_rows(x.reshape(-1, kernel.width), terms)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if has_output_scales(kernel):
        y = multiply_by_outputs(values, factors, kernel, dtype)
    else:
        assert terms == 1, "a block's sums are scaled apart, which takes longer than dequantizing the weight"
        y = multiply_by_blocks(values[0], factors, kernel, dtype)
    return y.reshape(*x.shape[:-1], *kernel.out_axes)


def split_rows(x: jax.Array, terms: int) -> tuple[jax.Array, jax.Array]:
    """x [rows, width] as products read it: u8[terms, rows, width] and the factors f32[rows]."""
    rows, width = x.shape
    values, factors = triton_call(
        split_kernel,
        (x, rows),
        [jax.ShapeDtypeStruct((terms, rows, width), jnp.uint8), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(rows,),
        terms=terms,
        width=width,
        half=BLOCK // 2,
        largest_code=LARGEST,
        scaled_exponent=SCALED_EXPONENT,
        smallest=SMALLEST,
        blocks=min(_SPLIT_BLOCKS, triton.next_power_of_2(width // BLOCK)),
    )
    return values, factors


def multiply_by_outputs(
    values: jax.Array, factors: jax.Array, kernel: CodedWeight, dtype: jnp.dtype
) -> jax.Array:
    """Split rows @ kernel, [rows, outputs], by cuBLAS, for which the codes of an output lie in a row."""
    terms, rows, _ = values.shape
    # All terms at once, so that the weight is read once.
    parts = multiply_codes(values, kernel, dtype)
    sums = parts.astype(jnp.float32).reshape(terms, rows, -1).sum(0)
    return (sums * factors[:, None] * output_scales(kernel)).astype(dtype)


def multiply_codes(values: jax.Array, kernel: CodedWeight, dtype: jnp.dtype) -> jax.Array:
    """The codes of split rows times those of a weight, [terms * rows, outputs]."""
    x, codes = (
        lax.bitcast_convert_type(each.reshape(-1, kernel.width), jnp.float8_e4m3fn)
        for each in (values, kernel.codes)
    )
    return lax.dot_general(x, codes, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def output_scales(kernel: CodedWeight) -> jax.Array:
    """f32[outputs]."""
    return jnp.repeat(lax.bitcast_convert_type(kernel.scale, jnp.float32).reshape(-1), kernel.scale_rows)


def multiply_by_blocks(
    values: jax.Array, factors: jax.Array, kernel: CodedWeight, dtype: jnp.dtype
) -> jax.Array:
    """Rounded rows @ kernel, [rows, outputs], for scales of blocks of inputs."""
    (rows, width), outputs = values.shape, math.prod(kernel.out_axes)
    programs = triton.cdiv(rows, _TILE["block_rows"]) * triton.cdiv(outputs, _TILE["block_outputs"])
    sections = count_sections(programs)
    (y,) = triton_call(
        product_kernel,
        (values, factors, kernel.codes, kernel.scale, rows),
        [
            jax.ShapeDtypeStruct((sections, rows, outputs), jnp.float32)
            if sections > 1
            else jax.ShapeDtypeStruct((rows, outputs), dtype)
        ],
        grid=(programs, sections),
        width=width,
        out_width=outputs,
        block=BLOCK,
        tile=kernel.codes.shape[-2],
        scale_rows=kernel.scale_rows,
        band=_BAND,
        sections=sections,
        **_TILE,
    )
    return sum(y[1:], start=y[0]).astype(dtype) if sections > 1 else y


def count_sections(programs: int) -> int:
    """The sections of the inputs that are summed apart: so many that few programs occupy a GPU."""
    sections = 1
    while programs * sections < _PROGRAMS and sections < _MOST_SECTIONS:
        sections *= 2
    return sections


@triton.jit
def split_kernel(
    x,
    rows,
    values,
    factors,
    terms: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    largest_code: tl.constexpr,
    scaled_exponent: tl.constexpr,
    smallest: tl.constexpr,
    blocks: tl.constexpr,
):
    """Splits a row (`reference.split_fp8`).

    The two halves of a block are interleaved, as the two codes of a weight's words are: the bytes of both are
    then operands of tensor cores as they lie in memory.

    Args:
      x: [rows, width].
      rows: a number, so that programs of different sizes share a compiled kernel.
      values: u8[terms, rows, width], codes of float8_e4m3fn.
      factors: f32[rows].
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * width
    values += row.to(tl.int64) * width
    block = tl.arange(0, blocks)[:, None]
    largest = tl.zeros((blocks, half), tl.float32)
    for start in range(0, width // (2 * half), blocks):
        inside = start + block < width // (2 * half)
        at = x + (start + block) * (2 * half) + tl.arange(0, half)[None, :]
        x0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
        largest = larger(largest, larger(tl.abs(x0), tl.abs(x1)))
    largest = tl.reduce(tl.reduce(largest, 1, larger), 0, larger)
    if terms == 1:
        inverse, factor = largest_to_code(largest, largest_code)
    else:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - scaled_exponent
        inverse = ((2 * 127 - exponent) << 23).to(tl.float32, bitcast=True)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(largest > smallest, inverse, 0.0)
    for start in range(0, width // (2 * half), blocks):
        inside = start + block < width // (2 * half)
        at = (start + block) * (2 * half)
        inputs = x + at + tl.arange(0, half)[None, :]
        x0 = tl.load(inputs, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(inputs + half, mask=inside, other=0.0).to(tl.float32)
        x0 *= inverse
        x1 *= inverse
        out = values + at + tl.arange(0, 2 * half)[None, :]
        for _ in tl.static_range(terms):
            code0, code1 = x0.to(tl.float8e4nv), x1.to(tl.float8e4nv)
            tl.store(out, tl.interleave(code0, code1).to(tl.uint8, bitcast=True), mask=inside)
            x0 -= code0.to(tl.float32)
            x1 -= code1.to(tl.float32)
            out += tl.full((), width, tl.int64) * rows
    tl.store(factors + row, checked_factor(factor, largest, smallest))


@triton.jit
def largest_to_code(largest, largest_code: tl.constexpr):
    """What makes rows' largest numbers the largest code, and the factor of these codes."""
    full = tl.zeros_like(largest) + largest_code
    return tl.div_rn(full, largest), tl.div_rn(largest, full)


@triton.jit
def checked_factor(factor, largest, smallest: tl.constexpr):
    """The factor of a row: NaN if it has infinity, which would be the largest code; 0 if it is too small."""
    factor = tl.where(largest < float("inf"), factor, float("nan"))
    return tl.where(largest <= smallest, 0.0, factor)


@triton.jit
def larger(a, b):
    """The larger number, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product_kernel(
    x,
    factors,
    codes,
    scale,
    rows,
    y,
    width: tl.constexpr,
    out_width: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    scale_rows: tl.constexpr,
    band: tl.constexpr,
    sections: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Multiplies a section of a tile of rounded rows with a tile of outputs.

    Args:
      x, factors: see `split_kernel`.
      codes, scale: of a `CodedWeight`.
      rows: a number, so that programs of different sizes share a compiled kernel.
      y: [rows, out_width], the result; f32[sections, rows, out_width] if there are several.
    """
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (out_width + block_outputs - 1) // block_outputs
    program = tl.program_id(0)
    first_row = program // (band * column_tiles) * band
    in_band = min(row_tiles - first_row, band)
    place = program % (band * column_tiles)
    row = (first_row + place % in_band) * block_rows + tl.arange(0, block_rows)
    column = place // in_band * block_outputs + tl.arange(0, block_outputs)
    steps: tl.constexpr = width // block
    length: tl.constexpr = (steps + sections - 1) // sections
    first = tl.program_id(1) * length
    last = tl.minimum(steps, first + length)
    index = first * block + tl.arange(0, block)
    taken = row < rows
    at = tl.minimum(column, out_width - 1)
    inputs = x.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    inputs += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * width + index[None, :]
    codes = codes.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + first * (tile * block)
    codes += (at // tile).to(tl.int64)[None, :] * (tile * width) + (at % tile * block)[None, :]
    codes += tl.arange(0, block)[:, None]
    # Where all outputs of a tile share their scales, a scale is a number.
    scale += (place // in_band * block_outputs if scale_rows % block_outputs == 0 else at) // scale_rows
    groups: tl.constexpr = out_width // scale_rows
    sums = tl.zeros((block_rows, block_outputs), tl.float32)
    # Scales are loaded a step ahead, because the compiler does not load numbers and short vectors ahead.
    next_scale = tl.load(scale + tl.minimum(first, steps - 1) * groups)
    for step in range(first, last):
        part = tl.dot(tl.load(inputs), tl.load(codes))
        own_scale, next_scale = next_scale, tl.load(scale + tl.minimum(step + 1, steps - 1) * groups)
        sums += part * _of_outputs(own_scale)
        inputs += block
        codes += tile * block
    sums *= tl.load(factors + tl.minimum(row, rows - 1))[:, None]
    out = y + tl.program_id(1).to(tl.int64) * rows * out_width
    out += row.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=taken[:, None] & (column < out_width)[None, :])


@triton.jit
def _of_outputs(scale):
    """Scales f32[1, outputs], or the one of all outputs."""
    scale = scale.to(tl.float32, bitcast=True)
    return scale[None, :] if len(scale.shape) else scale
