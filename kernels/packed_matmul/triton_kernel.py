"""Products with a weight in codes in a Triton kernel that reads the weight once, packed."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax.typing import DTypeLike
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.reference import packed_matmul as reference
from jaxspec_kernels.packed_matmul.triton_codes import coded_matmul
from jaxspec_kernels.triton_call import triton_call

_PROGRAMS = 256
"""The programs that occupy a GPU: two for each of some 130 multiprocessors."""
_MOST_SECTIONS = 8


class Tiles(NamedTuple):
    """The size of a program's tile, and how it is launched."""

    block_rows: int
    block_outputs: int
    num_warps: int
    num_stages: int


def packed_matmul(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """See `reference.packed_matmul`, which is called for cases that the kernel does not support."""
    if x.dtype != jnp.bfloat16 or not x.size:
        return reference(x, kernel, out_dtype=out_dtype)
    batch = x.shape[:-1]
    rows = math.prod(batch)
    if kernel.order is not None:
        x = jnp.take(x, kernel.order, axis=-1)
    y = multiply(
        x.reshape(rows, kernel.width),
        kernel,
        choose_tiles(rows, is_fp8=kernel.bits == 8 and not kernel.is_int8),
        sections=count_sections(kernel),
        dtype=jnp.dtype(out_dtype or x.dtype),
    )
    return y.reshape(*batch, *kernel.out_axes)


def multiply(
    x: jax.Array, kernel: CodedWeight, tiles: Tiles, *, sections: int, dtype: jnp.dtype
) -> jax.Array:
    """x [rows, width] @ kernel, [rows, outputs]; sums over sections of the inputs are added in order."""
    (rows, width), outputs = x.shape, math.prod(kernel.out_axes)
    programs = triton.cdiv(outputs, tiles.block_outputs) * triton.cdiv(rows, tiles.block_rows)
    is_split = sections > 1 and programs < _PROGRAMS
    constants: dict[str, Any] = tiles._asdict()
    (y,) = triton_call(
        coded_matmul,
        # Without offsets, that pointer is never read.
        (x, kernel.words, kernel.scale, kernel.scale if kernel.offset is None else kernel.offset),
        [
            jax.ShapeDtypeStruct((sections, rows, outputs), jnp.float32)
            if is_split
            else jax.ShapeDtypeStruct((rows, outputs), dtype)
        ],
        grid=(programs, sections if is_split else 1),
        rows=rows,
        width=width,
        out_width=outputs,
        per_word=kernel.per_word,
        block_words=kernel.words.shape[-1],
        tile=kernel.words.shape[-2],
        columns=kernel.columns,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        has_offset=kernel.offset is not None,
        is_int8=kernel.is_int8,
        sections=sections,
        is_split=is_split,
        **constants,
    )
    # In order, as the kernel adds them where a program computes all of them.
    return sum(y[1:], start=y[0]).astype(dtype) if is_split else y


def count_sections(kernel: CodedWeight) -> int:
    """The sections of the inputs that are summed apart: so many that few rows occupy a GPU.

    It depends on the weight's shape alone, so that a row's result does not depend on the number of rows.
    """
    tiles = triton.cdiv(math.prod(kernel.out_axes), 64)
    steps = kernel.words.shape[-3]
    sections = 1
    while sections * tiles < _PROGRAMS and sections < min(_MOST_SECTIONS, steps // 2):
        sections *= 2
    return sections


def choose_tiles(rows: int, *, is_fp8: bool) -> Tiles:
    """The tiles for so many rows. A row of x is read by every tile of outputs: more rows want wider tiles."""
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 64, 4, 4)
    if rows <= 64 or not is_fp8:
        return Tiles(64, 128, 8, 3)
    return Tiles(128, 128, 8, 3)
