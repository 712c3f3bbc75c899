"""Products whose sums have one order, in Triton.

Every output is one chain of additions: the accumulator of a tensor core takes 16 inputs at a time, from the
first to the last. On Hopper all matrix instructions give such a chain the same bits, whatever the tile, the
number of warps and the side that the weight is on, so tiles may be chosen by the number of rows. Splitting
the chain, as cuBLAS does for few rows, would change them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxspec_kernels.matmul.packed_weight import PackedWeight
from jaxspec_kernels.matmul.reference import matmul as reference
from jaxspec_kernels.triton_call import triton_call


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
    columns = weight.shape[1]
    chosen = tile(len(rows), columns)
    (y,) = triton_call(
        _product_kernel,
        (rows, weight, len(rows)),
        [jax.ShapeDtypeStruct((len(rows), columns), jnp.dtype(out_dtype or x.dtype))],
        grid=(triton.cdiv(columns, chosen.block_columns) * triton.cdiv(len(rows), chosen.block_rows),),
        width=width,
        columns=columns,
        band=_BAND,
        **chosen._asdict(),
    )
    return y.reshape(*x.shape[:-1], *outs)


class Tile(NamedTuple):
    """The sizes of a tile, and Triton's launch options for it."""

    block_rows: int
    block_width: int
    block_columns: int
    num_warps: int
    num_stages: int


_ENOUGH = 90
"""Programs that keep a Hopper GPU busy."""
_BAND = 8
"""Tiles of rows that share a block of columns while it is in the cache."""


def tile(rows: int, columns: int) -> Tile:
    """The largest tile of which there are enough; chosen by timing on an H100."""
    few = min(max(triton.next_power_of_2(rows), 16), 64)
    tiles = [
        Tile(few, 64, 128, 4, 4 if few > 32 else 6),
        Tile(few, 128, 64, 4, 6),
        Tile(few, 128, 32, 4, 6),
        Tile(few, 128, 16, 2, 4),
    ]
    if rows > 64:
        large = Tile(128, 64, 256, 8, 3 if rows <= 256 else 4)
        medium = Tile(128, 64, 128, 4, 4)
        tiles = [large, medium, Tile(64, 128, 128, 4, 3), Tile(64, 128, 64, 4, 4), *tiles[2:]]
    for each in tiles[:-1]:
        if triton.cdiv(rows, each.block_rows) * triton.cdiv(columns, each.block_columns) >= _ENOUGH:
            return each
    return tiles[-1]


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
):
    """Multiplies a tile of rows with a block of columns.

    Args:
      x: [rows, width].
      weight: [width, columns].
      rows: a number, so that programs of different sizes share a compiled kernel.
      y: [rows, columns], the result.
      band: see `_BAND`.
    """
    row_tiles = tl.cdiv(rows, block_rows)
    column_tiles: tl.constexpr = (columns + block_columns - 1) // block_columns
    program = tl.program_id(0)
    first = program // (band * column_tiles) * band
    in_band = min(row_tiles - first, band)
    place = program % (band * column_tiles)
    row = (first + place % in_band) * block_rows + tl.arange(0, block_rows)
    column = place // in_band * block_columns + tl.arange(0, block_columns)
    in_rows, in_columns = row < rows, column < columns
    index = tl.arange(0, block_width)
    inputs = x + row[:, None].to(tl.int64) * width + index[None, :]
    weights = weight + index[:, None].to(tl.int64) * columns + column[None, :]
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    for start in range(0, width, block_width):
        in_width = start + index < width
        part = tl.load(inputs, mask=in_rows[:, None] & in_width[None, :], other=0.0)
        block = tl.load(weights, mask=in_width[:, None] & in_columns[None, :], other=0.0)
        sums = tl.dot(part, block, sums)
        inputs += block_width
        weights += block_width * columns
    out = y + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
