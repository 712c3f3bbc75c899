"""Expands a weight in codes (`engine.packed`) to bfloat16 once, instead of for every tile of many rows."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight

_BLOCK_OUTPUTS = 64


def dequantize_codes(x: jax.Array, kernel: CodedWeight) -> jax.Array:
    """See `dequantize_reference.dequantize_codes`."""
    outputs = math.prod(kernel.out_axes)
    (dense,) = triton_call(
        dequantize_kernel,
        # Without offsets or an order, these pointers are never read.
        (
            x,
            kernel.codes,
            kernel.scale,
            kernel.scale if kernel.offset is None else kernel.offset,
            kernel.scale if kernel.order is None else kernel.order,
        ),
        [jax.ShapeDtypeStruct((kernel.width, outputs), jnp.bfloat16)],
        grid=(triton.cdiv(outputs, _BLOCK_OUTPUTS), kernel.codes.shape[-3]),
        width=kernel.width,
        out_width=outputs,
        per_word=kernel.per_word,
        block_words=kernel.block_words,
        tile=kernel.codes.shape[-2],
        columns=kernel.columns,
        scale_rows=kernel.scale_rows,
        has_zero=kernel.has_zero,
        has_offset=kernel.offset is not None,
        has_order=kernel.order is not None,
        is_int8=kernel.is_int8,
        block_outputs=_BLOCK_OUTPUTS,
    )
    return dense.reshape(kernel.width, *kernel.out_axes)


@triton.jit
def dequantize_kernel(
    x,
    codes,
    scale,
    offset,
    order,
    y,
    width: tl.constexpr,
    out_width: tl.constexpr,
    per_word: tl.constexpr,
    block_words: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    scale_rows: tl.constexpr,
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
    has_order: tl.constexpr,
    is_int8: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """A program dequantizes a block of inputs for some outputs; x is not read (see the reference)."""
    column = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    step = tl.program_id(1)
    at = tl.minimum(column, out_width - 1)
    words = codes.to(tl.pointer_type(tl.uint16), bitcast=True)
    stored = words + (at // tile).to(tl.int64)[:, None] * (tile * (width // per_word))
    stored += step * (tile * block_words) + (at % tile * block_words)[:, None]
    packed = tl.load(stored + tl.arange(0, block_words)[None, :]).to(tl.int32)
    for i in tl.static_range(per_word):
        first = (step * per_word + i) * block_words
        factor = tl.load(scale + first // columns * (out_width // scale_rows) + at // scale_rows)
        if per_word == 2:
            code = (packed >> 8 * i & 0xFF).to(tl.uint8)
            value = code.to(tl.int8 if is_int8 else tl.float8e4nv, bitcast=True).to(tl.float32)
        elif has_zero:
            value = ((packed >> 4 * i & 15) - (factor & 31).to(tl.int32)[:, None]).to(tl.float32)
        else:
            value = ((packed >> 4 * i & 15) - 8).to(tl.float32)
        if has_zero:
            factor = factor & 0xFFFFFFE0
        weight = value * factor.to(tl.float32, bitcast=True)[:, None]
        if has_offset:
            weight += tl.load(offset + first // columns * out_width + at)[:, None]
        weight = weight.to(tl.bfloat16)
        index = first + tl.arange(0, block_words)
        if has_order:
            index = tl.load(order + index)
        out = y + index.to(tl.int64)[:, None] * out_width + column[None, :]
        tl.store(out, tl.trans(weight), mask=(column < out_width)[None, :])
