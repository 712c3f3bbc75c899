"""The kernel of `packed_matmul` (`engine.packed`): codes are dequantized in registers, scales multiply sums.

The product is transposed, with the weights first: tensor cores can read their first operand from registers,
so dequantized weights never go through shared memory.
"""

import triton
import triton.language as tl
from jaxspec_kernels.packed_matmul.codes_ptx import (
    FP8,
    INT4,
    INT4_EACH_OFFSET,
    INT4_OFFSETS,
    INT8,
)

_FP8, _INT8, _INT4 = tl.constexpr(FP8), tl.constexpr(INT8), tl.constexpr(INT4)
_INT4_OFFSETS, _INT4_EACH_OFFSET = tl.constexpr(INT4_OFFSETS), tl.constexpr(INT4_EACH_OFFSET)


@triton.jit
def coded_matmul(
    x,
    codes,
    scale,
    offset,
    y,
    rows: tl.constexpr,
    width: tl.constexpr,
    out_width: tl.constexpr,
    per_word: tl.constexpr,
    block_words: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    scale_rows: tl.constexpr,
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
    is_int8: tl.constexpr,
    sections: tl.constexpr,
    is_split: tl.constexpr,
    is_gated: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Sums over sections of the inputs, and in a section over inputs that share a scale, are added in order.

    If `is_split`, a program computes one section, and `y` is f32[sections, rows, out_width]; otherwise it
    computes all of them, and `y` is [rows, out_width].

    If `is_gated`, the weight has twice as many outputs, gates and then ups, and `y` is SiLU of gates times
    ups.
    """
    words = codes.to(tl.pointer_type(tl.uint16), bitcast=True)
    tiles: tl.constexpr = (rows + block_rows - 1) // block_rows
    row = tl.program_id(0) % tiles * block_rows + tl.arange(0, block_rows)
    first_column, column, output = tile_columns(tl.program_id(0) // tiles, out_width, block_outputs, is_gated)
    outputs: tl.constexpr = 2 * out_width if is_gated else out_width
    # Where all outputs of a tile share their scales, a scale is a number.
    is_shared: tl.constexpr = not is_gated and scale_rows % block_outputs == 0
    scale += (first_column if is_shared else output) // scale_rows
    taken = (row < rows)[None, :]
    inputs = x + tl.minimum(row, rows - 1)[None, :].to(tl.int64) * width
    steps: tl.constexpr = width // (per_word * block_words)
    length: tl.constexpr = (steps + sections - 1) // sections
    out = row[None, :].to(tl.int64) * out_width + column[:, None]
    stored = taken & (column < out_width)[:, None]
    if is_split or sections == 1:
        section = tl.program_id(1)
        first = section * length
        sums = section_sums(
            inputs, taken, words, scale, offset, output, first, tl.minimum(steps, first + length),
            width, outputs, per_word, block_words, tile, columns, scale_rows, is_shared, has_zero, has_offset,
            is_int8, block_rows, block_outputs,
        )  # fmt: skip
        if is_gated:
            sums = gate_halves(sums)
        y += section.to(tl.int64) * (rows * out_width)
        tl.store(y + out, sums.to(y.dtype.element_ty), mask=stored)
    else:
        total = tl.zeros((block_outputs, block_rows), tl.float32)
        for first in range(0, steps, length):
            total += section_sums(
                inputs, taken, words, scale, offset, output, first, tl.minimum(steps, first + length),
                width, outputs, per_word, block_words, tile, columns, scale_rows, is_shared, has_zero,
                has_offset, is_int8, block_rows, block_outputs,
            )  # fmt: skip
        if is_gated:
            total = gate_halves(total)
        tl.store(y + out, total.to(y.dtype.element_ty), mask=stored)


@triton.jit
def tile_columns(index, out_width: tl.constexpr, block_outputs: tl.constexpr, is_gated: tl.constexpr):
    """The first column of a tile of results, all its columns, and the outputs [block_outputs] that they take.

    Half of a gated tile's outputs are gates, and the other half the ups for them.
    """
    block: tl.constexpr = block_outputs // 2 if is_gated else block_outputs
    first = index * block
    output = tl.minimum(first + tl.arange(0, block_outputs) % block, out_width - 1)
    output += tl.arange(0, block_outputs) // block * out_width
    return first, first + tl.arange(0, block), output


@triton.jit
def section_sums(
    inputs,
    taken,
    words,
    scale,
    offset,
    output,
    first,
    last,
    width: tl.constexpr,
    out_width: tl.constexpr,
    per_word: tl.constexpr,
    block_words: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    scale_rows: tl.constexpr,
    is_shared: tl.constexpr,
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
    is_int8: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """f32[block_outputs, block_rows]: the scaled sum over the steps from `first` to before `last`.

    Of the weight's `out_width` outputs, those in `output` [block_outputs] are computed. `words` and `offset`
    are those of the whole weight, and `scale` points to the first scale of each of these outputs, or to that
    of all of them if it `is_shared`.
    """
    by_group: tl.constexpr = columns < width
    per_group: tl.constexpr = columns // block_words  # codes of a word that share a scale
    # Tiles of outputs lie one after another, and in a tile the blocks of inputs.
    words += (output // tile).to(tl.int64)[:, None] * (tile * (width // per_word))
    words += (output % tile * block_words)[:, None] + tl.arange(0, block_words)[None, :]
    inputs += tl.arange(0, block_words)[:, None]
    offset += output
    groups: tl.constexpr = out_width // scale_rows
    per_step: tl.constexpr = per_word // per_group if by_group else 1
    # The compiler loads ahead what a product's operands are computed from, but no numbers. Many rows do not
    # wait for memory, and have no room for more than they need.
    is_vector: tl.constexpr = by_group and not is_shared
    is_ahead: tl.constexpr = is_vector and (block_rows <= 32 or has_zero)
    own_scale = scale
    if not by_group:
        s0 = tl.load(scale)
    elif not is_ahead:
        # Others are loaded a step ahead here. They never lie outside the array, even if a section is empty.
        own_scale += tl.minimum(first, width // (per_word * block_words) - 1) * (per_step * groups)
        s0_next = tl.load(own_scale)
        if per_step > 1:
            s1_next = tl.load(own_scale + groups)
        if per_step > 2:
            s2_next = tl.load(own_scale + 2 * groups)
            s3_next = tl.load(own_scale + 3 * groups)
    sums = tl.zeros((block_outputs, block_rows), tl.float32)
    for step in range(first, last):
        start = step * (block_words * per_word)
        packed = tl.load(words + step * (tile * block_words))
        x0 = tl.load(inputs + start, mask=taken, other=0.0)
        x1 = tl.load(inputs + (start + block_words), mask=taken, other=0.0)
        if by_group and not is_ahead:
            own_scale = scale + tl.minimum(step + 1, last - 1) * (per_step * groups)
            s0, s0_next = s0_next, tl.load(own_scale)
            if per_step > 1:
                s1, s1_next = s1_next, tl.load(own_scale + groups)
            if per_step > 2:
                s2, s2_next = s2_next, tl.load(own_scale + 2 * groups)
                s3, s3_next = s3_next, tl.load(own_scale + 3 * groups)
        elif by_group:
            own_scale = scale + step * (per_step * groups)
            s0 = tl.load(own_scale)
            if per_step > 1:
                s1 = tl.load(own_scale + groups)
            if per_step > 2:
                s2 = tl.load(own_scale + 2 * groups)
                s3 = tl.load(own_scale + 3 * groups)
        o0 = _operand(s0, packed, has_zero, is_ahead)
        o1 = _operand(s1 if per_step > 1 else s0, packed, has_zero, is_ahead)
        if per_word == 2:
            w0, w1 = tl.inline_asm_elementwise(
                _INT8 if is_int8 else _FP8,
                "=&r,=&r,r,r,r",
                [packed, o0, o1],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
            if by_group and per_group == 1:
                sums += tl.dot(w0, x0) * _factor(s0, has_zero)
                sums += tl.dot(w1, x1) * _factor(s1, has_zero)
                if has_offset:
                    # Sums as products, whose order does not depend on the tile.
                    ones = tl.full((block_outputs, block_words), 1.0, tl.bfloat16)
                    own = offset + start // columns * groups
                    sums += tl.dot(ones, x0) * tl.load(own)[:, None]
                    sums += tl.dot(ones, x1) * tl.load(own + groups)[:, None]
            elif by_group:
                sums += tl.dot(w1, x1, tl.dot(w0, x0)) * _factor(s0, has_zero)
            else:
                sums = tl.dot(w1, x1, tl.dot(w0, x0, sums))
        else:
            x2 = tl.load(inputs + (start + 2 * block_words), mask=taken, other=0.0)
            x3 = tl.load(inputs + (start + 3 * block_words), mask=taken, other=0.0)
            o2 = _operand(s2 if per_step > 2 else s0, packed, has_zero, is_ahead)
            o3 = _operand(s3 if per_step > 2 else s0, packed, has_zero, is_ahead)
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                (_INT4_EACH_OFFSET if per_step > 2 else _INT4_OFFSETS) if has_zero else _INT4,
                "=&r,=&r,=&r,=&r,r,r,r,r,r",
                [packed, o0, o1, o2, o3],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
            if by_group and per_group == 1:
                sums += tl.dot(w0, x0) * _factor(s0, has_zero)
                sums += tl.dot(w1, x1) * _factor(s1, has_zero)
                sums += tl.dot(w2, x2) * _factor(s2, has_zero)
                sums += tl.dot(w3, x3) * _factor(s3, has_zero)
                if has_offset:
                    # Sums as products, whose order does not depend on the tile.
                    ones = tl.full((block_outputs, block_words), 1.0, tl.bfloat16)
                    own = offset + start // columns * groups
                    sums += tl.dot(ones, x0) * tl.load(own)[:, None]
                    sums += tl.dot(ones, x1) * tl.load(own + groups)[:, None]
                    sums += tl.dot(ones, x2) * tl.load(own + 2 * groups)[:, None]
                    sums += tl.dot(ones, x3) * tl.load(own + 3 * groups)[:, None]
            elif by_group and per_group == 2:
                sums += tl.dot(w1, x1, tl.dot(w0, x0)) * _factor(s0, has_zero)
                sums += tl.dot(w3, x3, tl.dot(w2, x2)) * _factor(s1, has_zero)
            elif by_group:
                group = tl.dot(w1, x1, tl.dot(w0, x0))
                sums += tl.dot(w3, x3, tl.dot(w2, x2, group)) * _factor(s0, has_zero)
            else:
                sums = tl.dot(w1, x1, tl.dot(w0, x0, sums))
                sums = tl.dot(w3, x3, tl.dot(w2, x2, sums))
    if not by_group:
        sums *= _factor(s0, has_zero)
    return sums


@triton.jit
def gate_halves(sums):
    """SiLU of the first half of the outputs times the second half, f32[outputs / 2, rows]."""
    pairs = tl.reshape(sums, (2, sums.shape[0] // 2, sums.shape[1]))
    gate, up = tl.split(tl.permute(pairs, (1, 2, 0)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _factor(scale, has_zero: tl.constexpr):
    """Scales f32[outputs, 1], or the one of all outputs, without the zero points in their lowest bits."""
    if has_zero:
        scale = scale & 0xFFFFFFE0
    factor = scale.to(tl.float32, bitcast=True)
    return factor[:, None] if len(factor.shape) else factor


@triton.jit
def _operand(scale, like, has_zero: tl.constexpr, is_ahead: tl.constexpr):
    """What dequantizing words takes of the scales of all outputs, in the words' shape.

    With zero points, that is -128 less these in bfloat16. Otherwise it is not used, and only tells the
    compiler to load scales ahead.
    """
    if has_zero:
        zero = (scale & 31).to(tl.float32)
        return tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], like.shape)
    elif is_ahead:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.broadcast_to(scale.to(tl.uint16)[:, None], like.shape)
    else:
        return like
