"""The kernel of `expert_matmul` for experts in MXFP4, which it dequantizes in registers.

The product is transposed, with the weights first: tensor cores can read their first operand from registers,
so the dequantized weights never go through shared memory.
"""

import triton
import triton.language as tl
from jaxspec_kernels.expert_matmul.mxfp4_ptx import EXPAND, FACTOR_BIAS
from jaxspec_kernels.expert_matmul.triton_rows import program_tile, tile_rows

_EXPAND = tl.constexpr(EXPAND)
_FACTOR_BIAS = tl.constexpr(FACTOR_BIAS)


@triton.jit
def mxfp4_expert_matmul(
    x,
    experts_or_order,
    starts,
    values,
    scale,
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
    """x is [rows / per_input, 4, width / 4]: x[:, i, j] is input 4j + i, code i of the weights' word j."""
    expert, first, works = program_tile(experts_or_order, starts, rows, count, grouped, padded, block_rows)
    if works:
        row, taken = tile_rows(experts_or_order, starts, expert, first, rows, grouped, padded, block_rows)
        words: tl.constexpr = width // 4
        block_words: tl.constexpr = block_width // 4
        column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        in_columns = (column < columns)[:, None]
        at = (expert.to(tl.int64) * columns + column)[:, None]
        scales = scale + expert.to(tl.int64) * (width // 32) * columns
        inputs = x + (row // per_input)[None, :].to(tl.int64) * width
        sums = tl.zeros((block_outputs, block_rows), tl.float32)
        for start in range(0, words, block_words):
            word = start + tl.arange(0, block_words)
            block = start // 8 + tl.arange(0, block_words // 8)
            packed = tl.load(
                values + at * words + word[None, :], mask=in_columns & (word < words)[None, :], other=0
            )
            exponent = tl.load(
                scales + block[:, None] * columns + column[None, :],
                mask=(block < words // 8)[:, None] & (column < columns)[None, :],
                other=0,
            )
            w0, w1, w2, w3 = _dequantize(packed, tl.trans(exponent))
            part = inputs + word[:, None]
            mask = taken[None, :] & (word < words)[:, None]
            sums = tl.dot(w0, tl.load(part, mask=mask, other=0.0), sums)
            sums = tl.dot(w1, tl.load(part + words, mask=mask, other=0.0), sums)
            sums = tl.dot(w2, tl.load(part + 2 * words, mask=mask, other=0.0), sums)
            sums = tl.dot(w3, tl.load(part + 3 * words, mask=mask, other=0.0), sums)
        out = y + row[None, :].to(tl.int64) * columns + column[:, None]
        tl.store(out, sums, mask=taken[None, :] & in_columns)


@triton.jit
def _dequantize(packed, exponent):
    """The weights of the words' codes 0 to 3, four arrays bf16[outputs, words]."""
    factor = ((exponent.to(tl.int16) + _FACTOR_BIAS) << 7).to(tl.bfloat16, bitcast=True)
    shared = tl.broadcast_to(factor[:, :, None], (factor.shape[0], factor.shape[1], 8))
    return tl.inline_asm_elementwise(
        _EXPAND,
        "=&r,=&r,=&r,=&r,r,r",
        [packed, tl.reshape(shared, packed.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
