"""Inner loops of attention kernels for a CPU: Numba intrinsics over float32 rows and cached vectors."""

import math
from typing import Any

import numpy as np
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import BYTE, FLOAT, HALF, HALF_WORD, INTEGER, VectorCode, word
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, for_range_slice


def lanes_of(dim: int) -> int:
    """The numbers of a vector that divides a head of this width."""
    widest = 16 if "avx512f" in call.features() else 8
    return math.gcd(dim, widest)


def widening_code(kind: ir.Type, lanes: int, count: int) -> Any:
    """A Numba intrinsic that converts `count` numbers of LLVM's type `kind` to float32.

    Its arguments are their address and that of memory for the result. It returns the address of the result,
    which for float32 is that of the numbers themselves.
    """

    @call.intrinsic
    def widen(typing_context, numbers, result):
        def generate(context, builder, signature, arguments):
            numbers, result = arguments
            if kind is FLOAT:
                return numbers
            code = VectorCode(builder, lanes)
            with for_range(builder, word(count // lanes)) as loop:
                vector = code.floats_at(code.at(numbers, loop.index, 2 * lanes), kind)
                code.store(vector, code.at(result, loop.index, 4 * lanes), align=4)
            return result

        return types.int64(types.int64, types.int64), generate

    return widen


def decoding_code(lanes: int, dim: int, count: int) -> Any:
    """A Numba intrinsic that dequantizes `count` rows of a `CodedCache` to float32.

    Its arguments are the addresses of the codes [count, dim], of the exponents [count], and of the result. It
    returns the latter.
    """

    @call.intrinsic
    def decode(typing_context, codes, exponents, result):
        def generate(context, builder, signature, arguments):
            codes, exponents, result = arguments
            code = VectorCode(builder, lanes)
            bytes_, halves = (ir.VectorType(kind, lanes) for kind in (BYTE, HALF_WORD))
            constant = lambda value: ir.Constant(halves, [value] * lanes)  # noqa: E731
            with for_range(builder, word(count)) as loop:
                exponent = builder.zext(code.load(code.at(exponents, loop.index, 1), BYTE), INTEGER)
                scale = builder.shl(exponent, ir.Constant(INTEGER, 23))
                scale = code.spread(builder.bitcast(scale, FLOAT))
                row = code.at(codes, loop.index, dim)
                wide = code.at(result, loop.index, 4 * dim)
                for part in range(dim // lanes):
                    packed = builder.zext(code.load(code.at(row, part, lanes), bytes_), halves)
                    magnitude = builder.and_(packed, constant(0x7F))
                    is_nan = builder.icmp_unsigned("==", magnitude, constant(0x7F))
                    # As float16, whose exponents are 8 larger, so that subnormal codes are none in float32.
                    bits = builder.select(is_nan, constant(0x7E00), builder.shl(magnitude, constant(7)))
                    sign = builder.shl(builder.and_(packed, constant(0x80)), constant(8))
                    half = builder.bitcast(builder.or_(bits, sign), ir.VectorType(HALF, lanes))
                    value = builder.fmul(builder.fpext(half, code.floats), code.constant(256.0))
                    code.store(builder.fmul(value, scale), code.at(wide, part, 4 * lanes), align=4)
            return result

        return types.int64(types.int64, types.int64, types.int64), generate

    return decode


def copying(lanes: int, dim: int, is_half: bool) -> Any:
    """A function for kernels that copies a vector, from one address to another, as float32.

    Args:
      is_half: whether it is float16 where it comes from.
    """
    widen = widening_code(HALF, lanes, dim)

    @call.njit
    def copy(held, to):
        if is_half:
            widen(held, to)
        else:
            source, target = call.floats_at(held), call.floats_at(to)
            for d in range(dim):
                target[d] = source[d]

    return copy


def scores_code(tile: int, lanes: int, dim: int, kind: ir.Type) -> Any:
    """A Numba intrinsic that computes the products of a query and the keys of a tile.

    Its arguments are the addresses of the query f32[dim], the keys [tile, dim] of LLVM's type `kind` and the
    result f32[tile].
    """
    size = 2 if kind is HALF else 4

    @call.intrinsic
    def scores(typing_context, query, keys, result):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            query, keys, result = arguments
            for first in range(0, tile, lanes):
                sums = [ir.Constant(code.floats, None)] * lanes
                for part in range(dim // lanes):
                    factor = code.load(code.at(query, part, 4 * lanes), code.floats, align=4)
                    for i in range(lanes):
                        key = code.at(keys, (first + i) * dim + part * lanes, size)
                        sums[i] = code.fma(factor, code.floats_at(key, kind), sums[i])
                code.store(code.sums_of(sums), code.at(result, first, 4), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return scores


def softmax_code(lanes: int) -> Any:
    """A Numba intrinsic that replaces scores by exp(score - largest score) and returns their sum f32.

    Its arguments are the address of the scores f32[...], padded to whole vectors, and the positions `begin` <
    `end` of those that count. A NaN among them makes the sum NaN.
    """

    @call.intrinsic
    def softmax(typing_context, scores, begin, end):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            scores, begin, end = arguments
            from_ = builder.udiv(begin, word(lanes))
            to = builder.udiv(builder.add(end, word(lanes - 1)), word(lanes))
            integers = ir.VectorType(INTEGER, lanes)
            offsets = ir.Constant(integers, list(range(lanes)))

            def counted(index: Any) -> Any:
                left = builder.trunc(builder.mul(index, word(lanes)), INTEGER)
                at = builder.add(code.spread(left), offsets)
                after = builder.icmp_signed(">=", at, code.spread(builder.trunc(begin, INTEGER)))
                return builder.and_(
                    after, builder.icmp_signed("<", at, code.spread(builder.trunc(end, INTEGER)))
                )

            peaks = alloca_once_value(builder, code.constant(-np.inf))
            builder.store(code.constant(-np.inf), peaks)
            with for_range_slice(builder, from_, to, word(1), inc=True) as (index, _):
                score = code.load(code.at(scores, index, 4 * lanes), code.floats, align=4)
                score = builder.select(counted(index), score, code.constant(-np.inf))
                peak = builder.load(peaks)
                builder.store(code.larger(score, peak), peaks)
            peak = code.spread(code.folded(builder.load(peaks), code.larger))
            totals = alloca_once_value(builder, code.constant(0.0))
            builder.store(code.constant(0.0), totals)
            with for_range_slice(builder, from_, to, word(1), inc=True) as (index, _):
                place = code.at(scores, index, 4 * lanes)
                score = code.load(place, code.floats, align=4)
                value = code.exp(builder.fsub(score, peak))
                value = builder.select(counted(index), value, code.constant(0.0))
                code.store(value, place, align=4)
                builder.store(builder.fadd(builder.load(totals), value), totals)
            return code.folded(builder.load(totals), builder.fadd)

        return types.float32(*[types.int64] * 3), generate

    return softmax


def values_code(lanes: int, dim: int, rows: int, kind: ir.Type) -> Any:
    """A Numba intrinsic that adds weighted values to the sums of `rows` rows.

    Its arguments are the address of the first row's weights f32[count], the distance in bytes to those of the
    next row, the address of the values [count, dim] of LLVM's type `kind`, count, and the address of the sums
    f32[rows, dim].
    """
    size = 2 if kind is HALF else 4
    joined = next(joined for joined in (4, 2, 1) if not dim % (joined * lanes))

    @call.intrinsic
    def add(typing_context, weights, stride, values, count, sums):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            weights, stride, values, count, sums = arguments
            for first in range(0, dim // lanes, joined):
                vectors = range(first, first + joined)
                places = [code.at(sums, row * dim + i * lanes, 4) for row in range(rows) for i in vectors]
                totals = [alloca_once_value(builder, ir.Constant(code.floats, None)) for _ in places]
                for total, place in zip(totals, places, strict=True):
                    builder.store(code.load(place, code.floats, align=4), total)
                with for_range(builder, count) as loop:
                    at = code.at(values, loop.index, size * dim)
                    of_position = [code.floats_at(code.at(at, i, size * lanes), kind) for i in vectors]
                    for row in range(rows):
                        weight = code.at(builder.add(weights, builder.mul(stride, word(row))), loop.index, 4)
                        weight = code.spread(code.load(weight, FLOAT, align=4))
                        of_row = totals[row * joined : (row + 1) * joined]
                        for total, value in zip(of_row, of_position, strict=True):
                            builder.store(code.fma(weight, value, builder.load(total)), total)
                for total, place in zip(totals, places, strict=True):
                    code.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return add
