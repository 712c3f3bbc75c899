"""Products of many rows with a weight in codes, on a GPU of the Hopper generation."""

import math

import jax
import jax.numpy as jnp
import triton
from jax_triton import TensorDescriptor
from jaxspec_kernels.gluon_call import gluon_call
from jaxspec_kernels.op import device
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.hopper_codes import BLOCK_ROWS, GROUPS, TILE, WARPS, Sizes, coded_matmul
from triton.experimental.gluon.language import NVMMASharedLayout

_OUTPUTS = GROUPS * TILE
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200, each of which has room for one program."""
_OVERHEAD = 3
"""Steps that take as long as a program's beginning and end."""
_INPUTS, _WORDS = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(128, 8, 2)
"""How blocks of inputs and of words lie in a multiprocessor's memory."""


def reads(kernel: CodedWeight) -> bool:
    """Whether the kernel reads such a weight, and this GPU runs it."""
    is_read = kernel.block_words == TILE and kernel.offset is None and kernel.codes.shape[-2] in (1, TILE)
    return is_read and device().compute_capability == "9.0"


def multiply(x: jax.Array, kernel: CodedWeight, *, sections: int, dtype: jnp.dtype) -> jax.Array:
    """As `triton_kernel.multiply`, whose bits it gives with as many sections."""
    (rows, width), outputs = x.shape, math.prod(kernel.out_axes)
    is_row = kernel.codes.shape[-2] == 1
    sizes = Sizes(
        # Whole tiles, so that as many programs of an engine as can share a compiled kernel: it takes seconds.
        row_tiles=triton.cdiv(rows, BLOCK_ROWS),
        width=width,
        out_width=outputs,
        per_word=kernel.per_word,
        columns=kernel.columns,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        is_int8=kernel.is_int8,
        is_row=is_row,
        sections=sections,
    )
    codes = kernel.codes.reshape(-1, width if is_row else 2 * TILE)
    y = gluon_call(
        coded_matmul,
        (
            TensorDescriptor.from_array(x, (BLOCK_ROWS, TILE), _INPUTS),
            TensorDescriptor.from_array(codes, (TILE, 2 * TILE), _WORDS),
            kernel.scale,
        ),
        jax.ShapeDtypeStruct((sections, sizes.rows, outputs), jnp.float32)
        if sections > 1
        else jax.ShapeDtypeStruct((sizes.rows, outputs), dtype),
        grid=(_count_programs(rows, kernel), sections),
        num_warps=WARPS,
        sizes=sizes,
    )
    y = sum(y[1:], start=y[0]).astype(dtype) if sections > 1 else y
    return y[:rows]


def count_sections(rows: int, kernel: CodedWeight) -> int:
    """The sections that take the least time: as each multiprocessor runs a program, all run in waves."""
    programs, steps = _count_programs(rows, kernel), kernel.codes.shape[-3]

    def time(sections: int) -> int:
        return triton.cdiv(programs * sections, _PROGRAMS) * (triton.cdiv(steps, sections) + _OVERHEAD)

    return min((n for n in (1, 2, 4, 8) if n <= max(1, steps // 2)), key=time)


def _count_programs(rows: int, kernel: CodedWeight) -> int:
    """Of a section."""
    return triton.cdiv(math.prod(kernel.out_axes), _OUTPUTS) * triton.cdiv(rows, BLOCK_ROWS)
