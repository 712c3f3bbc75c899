"""Products of many rows with a weight in codes, on a GPU of the Hopper generation."""

import math

import jax
import jax.numpy as jnp
import triton
from jax_triton import TensorDescriptor
from jaxspec_kernels.gluon_call import gluon_call
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.hopper_codes import BLOCK_ROWS, GROUPS, TILE, WARPS, Kind, coded_matmul
from triton.experimental.gluon.language import NVMMASharedLayout

_OUTPUTS = GROUPS * TILE
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200, each of which has room for one program."""
_OVERHEAD = 3 * BLOCK_ROWS
"""Rows times steps that take as long as the beginning and end of a tile."""
_SUMS = 7000
"""Sums of sections that all multiprocessors write and add while each multiplies a row of a step."""
_INPUTS, _WORDS = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(128, 8, 2)
"""How blocks of inputs and of words lie in a multiprocessor's memory."""


def multiply(
    x: jax.Array, kernel: CodedWeight, *, sections: int, dtype: jnp.dtype, block_rows: int = BLOCK_ROWS
) -> jax.Array:
    """As `triton_kernel.multiply`, whose bits it gives with as many sections and `BLOCK_ROWS` rows of a tile.

    With `MANY_ROWS`, weights that have scales for groups of inputs are rounded to bfloat16.
    """
    (rows, width), outputs = x.shape, math.prod(kernel.out_axes)
    is_row = kernel.codes.shape[-2] == 1
    tiles = _count_tiles(rows, kernel, block_rows) * sections
    kind = Kind(
        block_rows=block_rows,
        columns=None if kernel.columns == width else kernel.columns,
        per_word=kernel.per_word,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        is_int8=kernel.is_int8,
        is_row=is_row,
    )
    codes = kernel.codes.reshape(-1, width if is_row else 2 * TILE)
    y = gluon_call(
        coded_matmul,
        (
            TensorDescriptor.from_array(x, (block_rows, TILE), _INPUTS),
            TensorDescriptor.from_array(codes, (TILE, 2 * TILE), _WORDS),
            kernel.scale,
            outputs,
            sections,
        ),
        jax.ShapeDtypeStruct((sections, rows, outputs), jnp.float32)
        if sections > 1
        else jax.ShapeDtypeStruct((rows, outputs), dtype),
        grid=(min(tiles, _PROGRAMS), 1),
        num_warps=WARPS,
        kind=kind,
    )
    return sum(y[1:], start=y[0]).astype(dtype) if sections > 1 else y


def count_sections(rows: int, kernel: CodedWeight, *, block_rows: int = BLOCK_ROWS) -> int:
    """The sections that take the least time, with tiles shared evenly by the multiprocessors."""
    tiles, steps = _count_tiles(rows, kernel, block_rows), kernel.codes.shape[-3]

    def time(sections: int) -> int:
        waves = triton.cdiv(tiles * sections, _PROGRAMS)
        sums = sections * rows * math.prod(kernel.out_axes) if sections > 1 else 0
        return waves * (triton.cdiv(steps, sections) * block_rows + _OVERHEAD) + sums // _SUMS

    return min((n for n in (1, 2, 4, 8) if n <= max(1, steps // 2)), key=time)


def _count_tiles(rows: int, kernel: CodedWeight, block_rows: int) -> int:
    """Of a section."""
    return triton.cdiv(math.prod(kernel.out_axes), _OUTPUTS) * triton.cdiv(rows, block_rows)
