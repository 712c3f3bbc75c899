"""Products in Triton whose sums have one order (`engine.exact = true`).

Every output is one chain of additions: the accumulator of a tensor core takes 16 inputs at a time, from the
first to the last. On Hopper all matrix instructions give such a chain the same bits, whatever the tile, the
number of warps and the side that the weight is on, so tiles may be chosen by the number of rows. Splitting
the chain, as cuBLAS does for few rows, would change them.

The tiles of many rows are loaded by the card's copy engine (TMA), which leaves threads and registers to the
products.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jax_triton import TensorDescriptor
from jaxspec_kernels.calls.triton_call import has_tma, triton_call
from jaxspec_kernels.matmul.packed_weight import PackedWeight
from jaxspec_kernels.matmul.reference import matmul as reference


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames="out_dtype")
def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """See `reference.matmul`, which computes other dtypes."""
    if isinstance(kernel, PackedWeight) or not (x.dtype == kernel.dtype and x.dtype.itemsize == 2 and x.size):
        return reference(x, kernel, out_dtype=out_dtype)
    width, *outs = kernel.shape
    rows, weight = x.reshape(-1, width), kernel.reshape(width, -1)
    y = product(rows, weight, tile(len(rows), weight.shape[1]), jnp.dtype(out_dtype or x.dtype))
    return y.reshape(*x.shape[:-1], *outs)


class Tile(NamedTuple):
    """The sizes of a tile, and Triton's launch options for it."""

    block_rows: int
    block_width: int
    block_columns: int
    num_warps: int
    num_stages: int


_FEW = 64
"""Rows for which reading the weight takes longer than multiplying."""
_ENOUGH = 90
"""Programs that keep a Hopper GPU busy with reading."""
_HALF = 60
"""Programs from which on the tiles of `MANY` are faster than more programs with smaller tiles."""
_MULTIPROCESSORS = 132
_BAND = 8
"""Tiles of rows that share a block of columns while it is in the cache."""
MANY = {
    Tile(128, 64, 256, 8, 4): 1.0,
    Tile(128, 64, 128, 8, 4): 0.6,
    Tile(64, 64, 256, 4, 4): 0.62,
    Tile(64, 128, 128, 4, 4): 0.37,
}
"""Tiles for many rows, and how long a program takes, relative to the first; timed on an H200."""


def tile(rows: int, columns: int) -> Tile:
    """The tile with which a product takes the shortest time."""

    def programs(each: Tile) -> int:
        return triton.cdiv(rows, each.block_rows) * triton.cdiv(columns, each.block_columns)

    if rows > _FEW and max(map(programs, MANY)) >= _HALF:
        return min(MANY, key=lambda each: triton.cdiv(programs(each), _MULTIPROCESSORS) * MANY[each])
    few = min(max(triton.next_power_of_2(rows), 16), _FEW)
    tiles = [
        Tile(few, 64, 128, 4, 4 if few > 32 else 6),
        Tile(few, 128, 64, 4, 6),
        Tile(few, 128, 32, 4, 6),
        Tile(few, 128, 16, 2, 4),
    ]
    return next((each for each in tiles if programs(each) >= _ENOUGH), tiles[-1])


def product(rows: jax.Array, weight: jax.Array, chosen: Tile, out_dtype: DTypeLike) -> jax.Array:
    """Multiplies rows [N, width] with a weight [width, columns] in tiles; gives [N, columns]."""
    (count, width), columns = rows.shape, weight.shape[1]
    inputs: list[Any] = [rows, weight]
    is_copied = chosen in MANY and has_tma() and width % 8 == columns % 8 == 0  # rows of 16 bytes
    if is_copied:
        blocks = (chosen.block_rows, chosen.block_width), (chosen.block_width, chosen.block_columns)
        inputs = [TensorDescriptor.from_array(*each) for each in zip(inputs, blocks, strict=True)]
    (y,) = triton_call(
        _product_kernel,
        [*inputs, count],
        [jax.ShapeDtypeStruct((count, columns), out_dtype)],
        grid=(triton.cdiv(columns, chosen.block_columns) * triton.cdiv(count, chosen.block_rows),),
        width=width,
        columns=columns,
        band=_BAND,
        is_copied=is_copied,
        **chosen._asdict(),
    )
    return y


@triton.jit
def _product_kernel(
    x,
    weight,
    rows,
    y,
    width: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
    block_columns: tl.constexpr,
    band: tl.constexpr,
    is_copied: tl.constexpr,
):
    """Multiplies a tile of rows with a block of columns.

    Args:
      x: [rows, width].
      weight: [width, columns].
      rows: a number, so that programs of different sizes share a compiled kernel.
      y: [rows, columns], the result.
      band: see `_BAND`.
      is_copied: whether `x` and `weight` are descriptors of tensors, whose blocks the copy engine loads.
    """
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (columns + block_columns - 1) // block_columns
    program = tl.program_id(0)
    first = program // (band * column_tiles) * band
    in_band = min(row_tiles - first, band)
    place = program % (band * column_tiles)
    first_row = (first + place % in_band) * block_rows
    first_column = place // in_band * block_columns
    row = first_row + tl.arange(0, block_rows)
    column = first_column + tl.arange(0, block_columns)
    in_rows, in_columns = row < rows, column < columns
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    if is_copied:
        for start in range(0, width, block_width):
            sums = tl.dot(x.load([first_row, start]), weight.load([start, first_column]), sums)
    else:
        index = tl.arange(0, block_width)
        inputs = x + row[:, None].to(tl.int64) * width + index[None, :]
        weights = weight + index[:, None].to(tl.int64) * columns + column[None, :]
        for start in range(0, width, block_width):
            in_width = start + index < width
            part = tl.load(inputs, mask=in_rows[:, None] & in_width[None, :], other=0.0)
            block = tl.load(weights, mask=in_width[:, None] & in_columns[None, :], other=0.0)
            sums = tl.dot(part, block, sums)
            inputs += block_width
            weights += block_width * columns
    out = y + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
