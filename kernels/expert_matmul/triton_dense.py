"""The kernel of `expert_matmul` for experts in bfloat16."""

import triton
import triton.language as tl
from jaxspec_kernels.expert_matmul.triton_rows import program_tile, tile_rows


@triton.jit
def dense_expert_matmul(
    x,
    experts_or_order,
    starts,
    weights,
    y,
    rows: tl.constexpr,
    per_input: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    grouped: tl.constexpr,
    padded: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Multiplies a tile of rows of one expert with a block of its outputs.

    Args:
      x: [rows / per_input, width].
      experts_or_order, starts: see `triton_rows.py`.
      weights: [count, width, columns].
      y: f32[rows, columns], the result.
    """
    expert, first, works = program_tile(experts_or_order, starts, rows, count, grouped, padded, block_rows)
    if works:
        row, taken = tile_rows(experts_or_order, starts, expert, first, rows, grouped, padded, block_rows)
        column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        in_columns = column < columns
        base = weights + expert.to(tl.int64) * width * columns
        inputs = x + (row // per_input)[:, None].to(tl.int64) * width
        sums = tl.zeros((block_rows, block_outputs), tl.float32)
        for start in range(0, width, block_width):
            k = start + tl.arange(0, block_width)
            in_width = k < width
            part = tl.load(inputs + k[None, :], mask=taken[:, None] & in_width[None, :], other=0.0)
            tile = tl.load(
                base + k[:, None] * columns + column[None, :],
                mask=in_width[:, None] & in_columns[None, :],
                other=0.0,
            )
            sums = tl.dot(part, tile, sums)
        out = y + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(out, sums, mask=taken[:, None] & in_columns[None, :])
