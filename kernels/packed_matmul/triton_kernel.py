"""Products in Triton with a weight in codes, which is read once (`engine.packed = true`)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax.typing import DTypeLike
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.packed_matmul import hopper_kernel
from jaxspec_kernels.packed_matmul.coded_weight import TILE, CodedWeight
from jaxspec_kernels.packed_matmul.hopper_tiles import BLOCK_ROWS, HOPPER_ROWS, MANY_ROWS, is_for_hopper
from jaxspec_kernels.packed_matmul.reference import gate
from jaxspec_kernels.packed_matmul.reference import packed_matmul as reference
from jaxspec_kernels.packed_matmul.triton_codes import coded_matmul

_PROGRAMS = 256
"""The programs that occupy a GPU: two for each of some 130 multiprocessors."""
_MULTIPROCESSORS = 132
_FEW_ROWS = 16
_SOME_ROWS = 32
_PROGRAMS_OF_FEW_ROWS = 384
"""They wait for memory most of the time, so more of them are needed."""
_MOST_SECTIONS = 8
_FEWEST_HOPPER_ROWS = 65
"""With fewer rows `hopper_kernel` is slower, on an H200."""
_MOST_EXACT_ROWS = 256
"""In exact mode, the sums of sections that it writes would be large with more rows."""


class Tiles(NamedTuple):
    """The size of a program's tile, and how it is launched."""

    block_rows: int
    block_outputs: int
    num_warps: int
    num_stages: int

    def programs(self, rows: int, outputs: int) -> int:
        """How many programs compute a product whose sums are not split."""
        return triton.cdiv(outputs, self.block_outputs) * triton.cdiv(rows, self.block_rows)


def packed_matmul(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """See `reference.packed_matmul`, which is called for cases that the kernel does not support."""
    if x.dtype != jnp.bfloat16 or not x.size:
        return reference(x, kernel, out_dtype=out_dtype)
    batch = x.shape[:-1]
    rows = math.prod(batch)
    x = _ordered(x, kernel)
    dtype = jnp.dtype(out_dtype or x.dtype)
    of_exact = count_sections(kernel, _FEW_ROWS) if is_exact() else None
    most = _MOST_EXACT_ROWS if of_exact else HOPPER_ROWS
    if _FEWEST_HOPPER_ROWS <= rows <= most and is_for_hopper(kernel):
        block_rows = MANY_ROWS if rows > BLOCK_ROWS and not of_exact else BLOCK_ROWS
        y = hopper_kernel.multiply(x, kernel, dtype=dtype, block_rows=block_rows, sections=of_exact)
    else:
        tiles = choose_tiles(rows, math.prod(kernel.out_axes), is_fp8=kernel.is_fp8)
        sections = of_exact or count_sections(kernel, rows)
        y = multiply(x, kernel, tiles, sections=sections, dtype=dtype)
    return y.reshape(*batch, *kernel.out_axes)


def gated_packed_matmul(x: jax.Array, gate_up: CodedWeight) -> jax.Array:
    """See `reference.gated_packed_matmul`."""
    batch = x.shape[:-1]
    rows = math.prod(batch)
    outputs = math.prod(gate_up.out_axes)
    if is_exact() or x.dtype != jnp.bfloat16 or not x.size:
        return gate(packed_matmul(x, gate_up))
    tiles = choose_tiles(rows, outputs, is_fp8=gate_up.is_fp8)
    # With fewer programs, each would compute a section of its sums.
    if rows < _FEWEST_HOPPER_ROWS and tiles.programs(rows, outputs) >= _PROGRAMS:
        sections = count_sections(gate_up, rows)
        y = multiply(_ordered(x, gate_up), gate_up, tiles, sections=sections, dtype=x.dtype, is_gated=True)
    # With up to 128 rows Hopper's kernel takes 5 % longer than the product and SiLU apart.
    elif BLOCK_ROWS < rows <= HOPPER_ROWS and is_for_hopper(gate_up) and gate_up.out_axes[-1] % TILE == 0:
        x = _ordered(x, gate_up)
        y = hopper_kernel.multiply(x, gate_up, dtype=x.dtype, block_rows=MANY_ROWS, is_gated=True)
    else:
        return gate(packed_matmul(x, gate_up))
    return y.reshape(*batch, gate_up.out_axes[-1])


def _ordered(x: jax.Array, kernel: CodedWeight) -> jax.Array:
    """x as [rows, width], its inputs in the order of the codes."""
    if kernel.order is not None:
        x = jnp.take(x, kernel.order, axis=-1)
    return x.reshape(-1, kernel.width)


def multiply(
    x: jax.Array,
    kernel: CodedWeight,
    tiles: Tiles,
    *,
    sections: int,
    dtype: jnp.dtype,
    is_gated: bool = False,
) -> jax.Array:
    """x [rows, width] @ kernel, [rows, outputs]; sums over sections of the inputs are added in order.

    If `is_gated`, the outputs are gates and ups, and the result is SiLU of gates times ups; the sums must be
    whole then.
    """
    (rows, width), outputs = x.shape, math.prod(kernel.out_axes)
    programs = tiles.programs(rows, outputs)
    out_width = outputs // 2 if is_gated else outputs
    is_split = sections > 1 and programs < _PROGRAMS
    constants: dict[str, Any] = tiles._asdict()
    (y,) = triton_call(
        coded_matmul,
        # Without offsets, that pointer is never read.
        (x, kernel.codes, kernel.scale, kernel.scale if kernel.offset is None else kernel.offset),
        [
            jax.ShapeDtypeStruct((sections, rows, outputs), jnp.float32)
            if is_split
            else jax.ShapeDtypeStruct((rows, out_width), dtype)
        ],
        grid=(programs, sections if is_split else 1),
        rows=rows,
        width=width,
        out_width=out_width,
        per_word=kernel.per_word,
        block_words=kernel.block_words,
        tile=kernel.codes.shape[-2],
        columns=kernel.columns,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        has_offset=kernel.offset is not None,
        is_int8=kernel.is_int8,
        sections=sections,
        is_split=is_split,
        is_gated=is_gated,
        **constants,
    )
    # In order, as the kernel adds them where a program computes all of them.
    return sum(y[1:], start=y[0]).astype(dtype) if is_split else y


def count_sections(kernel: CodedWeight, rows: int) -> int:
    """The sections of the inputs that are summed apart: so many that few rows occupy a GPU.

    In exact mode, `rows` is a constant, so that a row's result does not depend on the number of rows.
    """
    tiles = triton.cdiv(math.prod(kernel.out_axes), 64)
    steps = kernel.codes.shape[-3]
    few = _SOME_ROWS if kernel.is_fp8 else _FEW_ROWS
    wanted = _PROGRAMS_OF_FEW_ROWS if rows <= few else _PROGRAMS
    sections = 1
    while sections * tiles < wanted and sections < min(_MOST_SECTIONS, steps // 2):
        sections *= 2
    return sections


def choose_tiles(rows: int, outputs: int, *, is_fp8: bool) -> Tiles:
    """The tiles for so many rows and outputs, by time on an H100, and for 9 to 32 rows on an H200.

    A multiprocessor runs several tiles of four warps at once: one dequantizes codes, another multiplies.
    """
    if rows <= 8:
        return Tiles(8, 32, 2 if is_fp8 else 1, 3)
    if rows <= _FEW_ROWS:
        return Tiles(16, 32 if is_fp8 else 64, 2, 3)
    if rows <= _SOME_ROWS:
        # Rows are read half as often, if no multiprocessor has more outputs to compute.
        if _most_outputs(outputs, 128) <= _most_outputs(outputs, 64):
            return Tiles(32, 128, 4, 4 if is_fp8 else 3)
        return Tiles(32, 64, 2 if is_fp8 else 4, 3)
    if not is_fp8:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 128, 8, 3) if rows <= 64 else Tiles(128, 64, 4, 3)


def _most_outputs(outputs: int, tile: int) -> int:
    """The outputs of the multiprocessor with the most tiles."""
    return triton.cdiv(triton.cdiv(outputs, tile), _MULTIPROCESSORS) * tile
