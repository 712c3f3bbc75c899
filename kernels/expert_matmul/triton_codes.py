"""The kernel of `expert_matmul` for experts in codes (`engine.packed`), dequantized as in `packed_matmul`."""

import triton
import triton.language as tl
from jaxspec_kernels.expert_matmul.triton_rows import program_tile, tile_rows
from jaxspec_kernels.packed_matmul.triton_codes import gate_halves, section_sums, tile_columns


@triton.jit
def coded_expert_matmul(
    x,
    experts_or_order,
    starts,
    codes,
    scale,
    offset,
    y,
    rows: tl.constexpr,
    per_input: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    grouped: tl.constexpr,
    padded: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    per_word: tl.constexpr,
    block_words: tl.constexpr,
    tile: tl.constexpr,
    group: tl.constexpr,
    scale_rows: tl.constexpr,
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
    is_int8: tl.constexpr,
    is_gated: tl.constexpr,
):
    expert, first, works = program_tile(experts_or_order, starts, rows, count, grouped, padded, block_rows)
    if works:
        row, taken = tile_rows(experts_or_order, starts, expert, first, rows, grouped, padded, block_rows)
        first_column, column, output = tile_columns(tl.program_id(0), columns, block_outputs, is_gated)
        outputs: tl.constexpr = 2 * columns if is_gated else columns
        # Where all outputs of a tile share their scales, a scale is a number.
        is_shared: tl.constexpr = not is_gated and scale_rows % block_outputs == 0
        own_scale = scale + (first_column if is_shared else output) // scale_rows
        at = expert.to(tl.int64)
        sums = section_sums(
            x + (row // per_input)[None, :].to(tl.int64) * width,
            taken[None, :],
            codes.to(tl.pointer_type(tl.uint16), bitcast=True) + at * (outputs * (width // per_word)),
            own_scale + at * (width // group * (outputs // scale_rows)),
            offset + at * (width // group * outputs),
            output,
            0,
            width // (per_word * block_words),
            width,
            outputs,
            per_word,
            block_words,
            tile,
            group,
            scale_rows,
            is_shared,
            has_zero,
            has_offset,
            is_int8,
            block_rows,
            block_outputs,
        )
        if is_gated:
            sums = gate_halves(sums)
        out = y + row[None, :].to(tl.int64) * columns + column[:, None]
        tl.store(out, sums.to(y.dtype.element_ty), mask=taken[None, :] & (column < columns)[:, None])
