"""Products of many rows with a weight in codes on Hopper (`engine.packed = true`)."""

import math

import jax
import jax.numpy as jnp
import triton
from jax_triton import TensorDescriptor
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.gluon_call import gluon_call
from jaxspec_kernels.packed_matmul.hopper_codes import GROUPS, TILE, WARPS, Kind, coded_matmul
from jaxspec_kernels.packed_matmul.hopper_tiles import PROGRAMS, split_tiles
from triton.experimental.gluon.language import NVMMASharedLayout

_OUTPUTS = GROUPS * TILE
_INPUTS, _WORDS = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(128, 8, 2)
"""How blocks of inputs and of words lie in a multiprocessor's memory."""


def multiply(
    x: jax.Array,
    kernel: CodedWeight,
    *,
    dtype: jnp.dtype,
    block_rows: int,
    sections: int | None = None,
    is_gated: bool = False,
) -> jax.Array:
    """x [rows, width] @ kernel, [rows, outputs].

    With `BLOCK_ROWS`, as many sections give the bits of `triton_kernel.multiply`. With `MANY_ROWS`, weights
    that have scales for groups of inputs are rounded to bfloat16.

    Args:
      dtype: of the result.
      block_rows: rows of a tile, `BLOCK_ROWS` or `MANY_ROWS`.
      sections: of the inputs, which are summed apart and then added in order; None for what takes the least
        time, which may differ between tiles.
      is_gated: give SiLU of the first half of the outputs times the second half.
    """
    (rows, width), outputs = x.shape, math.prod(kernel.out_axes)
    is_row = kernel.codes.shape[-2] == 1
    tiles = triton.cdiv(outputs, _OUTPUTS) * triton.cdiv(rows, block_rows)
    if sections is None:
        whole, sections = split_tiles(tiles, kernel.codes.shape[-3], kernel.per_word, block_rows)
    else:
        whole = 0 if sections > 1 else tiles
    kind = Kind(
        block_rows=block_rows,
        columns=None if kernel.columns == width else kernel.columns,
        per_word=kernel.per_word,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        is_int8=kernel.is_int8,
        is_row=is_row,
        is_gated=is_gated,
    )
    codes = kernel.codes.reshape(-1, width if is_row else 2 * TILE)
    split = max(tiles - whole, 1)
    y, *_ = gluon_call(
        coded_matmul,
        (
            TensorDescriptor.from_array(x, (block_rows, TILE), _INPUTS),
            TensorDescriptor.from_array(codes, (kind.box, 2 * TILE), _WORDS),
            kernel.scale,
            outputs,
            whole,
            sections,
        ),
        (
            jax.ShapeDtypeStruct((rows, outputs // 2 if is_gated else outputs), dtype),
            jax.ShapeDtypeStruct((split, GROUPS, sections, block_rows, TILE), jnp.float32),
            jax.ShapeDtypeStruct((split, GROUPS), jnp.int32),
        ),
        num_zeroed=1 if whole < tiles else 0,
        grid=(min(whole + (tiles - whole) * sections, PROGRAMS), 1),
        num_warps=WARPS,
        kind=kind,
    )
    return y
