"""A step's rows on a CPU, by the gated delta rule or by Mamba-2.

XLA goes through a state several times for every row. Here a part of its columns stays in the nearest cache
while all rows go over it, once each. By the delta rule a change depends on what the state gives for its key,
so a pass adds a row's change and multiplies by the next row's key and query; by Mamba-2 it multiplies by the
row's own query. A row's sums do not depend on the slots beside it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, VectorCode, word
from jaxspec_kernels.linear_recurrence.reference import recurrence_step as reference
from jaxspec_kernels.linear_recurrence.rules import DeltaRule, Rule
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range

_FASTMATH = {"contract", "nsz"}
_ALONE = 1 << 18
"""Below so many numbers of states to go through, waking another thread takes longer than its half."""


def recurrence_step(
    state: jax.Array,
    inputs: jax.Array,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `reference`, which computes other cases than those in float32."""
    given = (state, inputs, pending, rows, place, unapplied)
    if not _is_for(state, inputs, pending, rows, rule.conv):
        return reference(*given, rule)
    weights = rule.conv, rule.log_decay, rule.step_bias
    if isinstance(rule, DeltaRule):
        return _call(given, weights)
    channels = (rule.conv.shape[0], rule.conv.shape[2])
    bias = jnp.zeros(channels) if rule.conv_bias is None else rule.conv_bias
    return _call(given, (*weights, bias.astype(jnp.float32), rule.skip))


def _is_for(*arrays: jax.Array) -> bool:
    return all(x.dtype == jnp.float32 for x in arrays) and arrays[3].size > 0


def _call(
    given: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Runs the kernel; the last two of the `weights` are Mamba-2's own."""
    state, inputs, pending, rows, *_ = given
    conv, _, _, *own = weights
    groups, count, heads, _ = rows.shape
    _, _, group, key_size, value_size = state.shape
    updated = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, inputs, pending)]
    created = jax.ShapeDtypeStruct((groups, count, heads, group, value_size), jnp.float32)
    work = groups * heads * group * key_size * value_size * (count + pending.shape[1])
    target = _target(not own, key_size, value_size, conv.shape[1], work < _ALONE)
    kernel = jax.ffi.ffi_call(target, [*updated, created], input_output_aliases={0: 0, 1: 1, 2: 2})
    state, inputs, pending, outputs = kernel(*given, *weights)
    return state, inputs, pending, outputs


@call.once
def _target(corrects: bool, key_size: int, value_size: int, conv_width: int, alone: bool) -> str:
    """Compiles and registers the kernel for these sizes; returns its name.

    `corrects` says by which rule: whether what the state gave for a key is taken from its new value.
    """
    widest = 16 if "avx512f" in call.features() else 8
    lanes = math.gcd(math.gcd(key_size, value_size), widest)
    # A column tile's products with key and query, and its change, are in registers.
    joined = next(n for n in ((4, 2, 1) if widest == 16 else (2, 1)) if not value_size % (n * lanes))
    tile, before = joined * lanes, conv_width - 1
    convolve = _convolution_code(lanes, conv_width, has_bias=not corrects)
    begin, go_on = (_pass_code(lanes, joined, key_size, updates, corrects) for updates in (False, True))
    normalise = _norm_code(lanes, key_size)
    one = np.float32(1)
    # Arguments; other weights in the place of those that the delta rule does not have are never read.
    bias_argument, skip_argument = (6, 8) if corrects else (9, 10)

    def kernel(frame, part, parts):
        state_, inputs_, pending_ = call.result(frame, 0), call.result(frame, 1), call.result(frame, 2)
        rows_, conv_ = call.argument(frame, 3), call.argument(frame, 6)
        groups, count, heads, width = call.shape(rows_, 4)
        places, _, group, _, _ = call.shape(state_, 5)
        _, most, _, _ = call.shape(pending_, 4)
        channels = call.shape(conv_, 3)[2]
        place, unapplied = call.integers(call.argument(frame, 4)), call.integers(call.argument(frame, 5))
        log_decay, step_bias = call.floats(call.argument(frame, 7)), call.floats(call.argument(frame, 8))
        bias_, skip = call.argument(frame, bias_argument), call.floats(call.argument(frame, skip_argument))
        inputs, pending, rows = call.floats(inputs_), call.floats(pending_), call.floats(rows_)
        outputs = call.floats(call.result(frame, 3))
        text_at = call.allocate(8 * (before + most + count))
        text = call.words_at(text_at)
        # Of a row's channels.
        values = group * value_size
        query_of, key_of, value_of = (
            (0, key_size, 2 * key_size) if corrects else (values + key_size, values, 0)
        )
        # Of every row: its channels, its decays and strengths, and key times query.
        each = channels + 2 * group + 1
        acts_at = call.allocate(4 * each * (most + count))
        acts = call.floats_at(acts_at)
        # A column tile of a state behind drafts, its products with the next row, and its change.
        scratch = call.allocate(4 * tile * (key_size + 3))
        products_at = scratch + 4 * tile * key_size
        products, change_at = call.floats_at(products_at), products_at + 8 * tile
        change = call.floats_at(change_at)
        units = groups * heads
        for unit in range(units * part // parts, units * (part + 1) // parts):
            g, h = unit // heads, unit % heads
            slot = place[g]
            if slot < 0 or slot >= places:
                for i in range(count):
                    out = value_size * group * (heads * (count * g + i) + h)
                    for d in range(group * value_size):
                        outputs[out + d] = np.float32(0)
                continue
            accepted = min(max(unapplied[g], 0), most)
            total = accepted + count
            kept = channels * before * (heads * slot + h)
            for i in range(before):
                text[i] = call.address(inputs_) + 4 * (kept + channels * i)
            for i in range(total):
                if i < accepted:
                    at = call.address(pending_) + 4 * width * (heads * (most * slot + i) + h)
                else:
                    at = call.address(rows_) + 4 * width * (heads * (count * g + i - accepted) + h)
                text[before + i] = at
                row = each * i
                weights = call.address(conv_) + 4 * channels * conv_width * h
                bias = call.address(bias_) + 4 * channels * h
                convolve(text_at + 8 * i, weights, bias, acts_at + 4 * row, channels // lanes)
                if corrects:
                    acts[row + each - 1] = normalise(acts_at + 4 * row)
                scalars = call.floats_at(at + 4 * channels)
                for j in range(group):
                    # Steps come last.
                    x = scalars[width - channels - group + j] + step_bias[group * h + j]
                    step = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
                    acts[row + channels + j] = np.exp(-np.exp(log_decay[group * h + j]) * step)
                    strength = one / (one + np.exp(-scalars[j])) if corrects else step
                    acts[row + channels + group + j] = strength
            # Each goes to a place before its own.
            for i in range(before):
                last = call.floats_at(text[accepted + 1 + i])
                for d in range(channels):
                    inputs[kept + channels * i + d] = last[d]
            for i in range(count - 1):
                draft = width * (heads * (count * g + i + 1) + h)
                own = width * (heads * (most * slot + i) + h)
                for d in range(width):
                    pending[own + d] = rows[draft + d]
            for j in range(group):
                for column in range(0, value_size, tile):
                    at = key_size * value_size * (group * (heads * slot + h) + j) + column
                    source, stride = call.address(state_) + 4 * at, 4 * value_size
                    if corrects:
                        begin(source, stride, source, stride, one, acts_at, acts_at, acts_at, products_at)
                    for i in range(total):
                        row = each * i
                        decay, strength = acts[row + channels + j], acts[row + channels + group + j]
                        value = row + value_of + value_size * j + column
                        out = value_size * (group * (heads * (count * g + i - accepted) + h) + j) + column
                        of_key, of_query = acts_at + 4 * (row + key_of), acts_at + 4 * (row + query_of)
                        if corrects:
                            for d in range(tile):
                                change[d] = strength * (acts[value + d] - decay * products[tile + d])
                            if i >= accepted:
                                both = acts[row + each - 1]
                                for d in range(tile):
                                    outputs[out + d] = decay * products[d] + both * change[d]
                            if i > accepted and i + 1 == total:
                                break
                            of_query = acts_at + 4 * each * min(i + 1, total - 1)
                        else:
                            for d in range(tile):
                                change[d] = strength * acts[value + d]
                        into, step_into = (source, stride) if i <= accepted else (scratch, 4 * tile)
                        go_on(
                            source, stride, into, step_into, decay, of_key, change_at, of_query, products_at
                        )
                        if not corrects and i >= accepted:
                            for d in range(tile):
                                outputs[out + d] = products[d] + skip[group * h + j] * acts[value + d]
                        source, stride = into, step_into
        call.release(text_at)
        call.release(acts_at)
        call.release(scratch)
        return 0

    rule = "delta" if corrects else "mamba"
    name = f"jaxspec_{rule}_step_{key_size}_{value_size}_{conv_width}{'_alone' * alone}"
    return call.register(name, kernel, fastmath=_FASTMATH, alone=alone)


def _convolution_code(lanes: int, width: int, has_bias: bool) -> Any:
    """A Numba intrinsic that sums a row's last inputs, times weights, and applies SiLU.

    Its arguments are the address of the `width` addresses of the inputs f32[channels], and those of the
    weights f32[width, channels], of the bias (not read unless `has_bias`) and of the result, and the number
    of vectors.
    """

    @call.intrinsic
    def convolve(typing_context, taps, weights, bias, result, count):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            taps, weights, bias, result, count = arguments
            sources = [code.load(code.at(taps, i, 8), ir.IntType(64), align=8) for i in range(width)]
            with for_range(builder, count) as loop:
                total = ir.Constant(code.floats, None)
                if has_bias:
                    total = code.load(code.at(bias, loop.index, 4 * lanes), code.floats, align=4)
                for i, source in enumerate(sources):
                    place = code.at(weights, builder.add(builder.mul(count, word(i)), loop.index), 4 * lanes)
                    factor = code.load(place, code.floats, align=4)
                    tap = code.load(code.at(source, loop.index, 4 * lanes), code.floats, align=4)
                    total = code.fma(factor, tap, total)
                # Of -|x|, whose exponential is at most 1.
                is_negative = builder.fcmp_ordered("<", total, code.constant(0.0))
                low = builder.select(is_negative, total, builder.fsub(code.constant(-0.0), total))
                power = code.exp(low)
                one = code.constant(1.0)
                share = builder.fdiv(builder.select(is_negative, power, one), builder.fadd(one, power))
                code.store(builder.fmul(total, share), code.at(result, loop.index, 4 * lanes), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return convolve


def _norm_code(lanes: int, key_size: int) -> Any:
    """A Numba intrinsic that scales a query to the length 1 / sqrt(key_size), and a key to 1.

    Its argument is the address of the query and the key, f32[2, key_size]. It returns their product.
    """

    @call.intrinsic
    def normalise(typing_context, address):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            (query,) = arguments
            key = builder.add(query, word(4 * key_size))
            count = word(key_size // lanes)
            zero = ir.Constant(code.floats, None)
            totals = [alloca_once_value(builder, zero) for _ in range(3)]
            for total in totals:
                builder.store(zero, total)

            def at(base: Any, index: Any) -> Any:
                return code.at(base, index, 4 * lanes)

            with for_range(builder, count) as loop:
                one, other = (code.load(at(x, loop.index), code.floats, align=4) for x in (query, key))
                for total, (x, y) in zip(totals, ((one, one), (other, other), (one, other)), strict=True):
                    builder.store(code.fma(x, y, builder.load(total)), total)
            squares, key_squares, both = (code.folded(builder.load(total), builder.fadd) for total in totals)
            single, factors = VectorCode(builder, 1), []
            for total, size in ((squares, key_size), (key_squares, 1)):
                length = builder.fmul(builder.fadd(total, FLOAT(1e-6)), FLOAT(size))
                factors.append(builder.fdiv(FLOAT(1.0), single.call("llvm.sqrt.f32", FLOAT, length)))
            with for_range(builder, count) as loop:
                for base, scale in zip((query, key), factors, strict=True):
                    place = at(base, loop.index)
                    vector = builder.fmul(code.load(place, code.floats, align=4), code.spread(scale))
                    code.store(vector, place, align=4)
            return builder.fmul(builder.fmul(both, factors[0]), factors[1])

        return types.float32(types.int64), generate

    return normalise


def _pass_code(lanes: int, joined: int, key_size: int, updates: bool, corrects: bool) -> Any:
    """A Numba intrinsic that goes through a column tile of a state.

    Its arguments are the tile's address and the distance of its rows in bytes, the same of where the updated
    tile goes, the decay, and addresses: of a row's key, of the change f32[tile], of a query, with the next
    row's key behind it if `corrects`, and of the updated tile's products with these, f32[1 or 2, tile].
    Without `updates` the tile stays.
    """
    num_factors = 2 if corrects else 1

    @call.intrinsic
    def go_on(typing_context, source, stride, into, step, decay, key, change, query, products):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            source, stride, into, step, decay, key, change, query, products = arguments
            decay = code.spread(decay)
            changes = [code.load(code.at(change, i * lanes, 4), code.floats, align=4) for i in range(joined)]
            zero = ir.Constant(code.floats, None)
            totals = [[alloca_once_value(builder, zero) for _ in range(joined)] for _ in range(num_factors)]
            for total in (each for of_one in totals for each in of_one):
                builder.store(zero, total)

            def factor(base: Any, index: Any) -> Any:
                return code.spread(code.load(code.at(base, index, 4), FLOAT, align=4))

            with for_range(builder, word(key_size)) as loop:
                index = loop.index
                from_, to = (
                    builder.add(base, builder.mul(index, each))
                    for base, each in ((source, stride), (into, step))
                )
                factors = [factor(query, builder.add(index, word(i * key_size))) for i in range(num_factors)]
                of_key = factor(key, index)
                for i in range(joined):
                    held = code.load(code.at(from_, i * lanes, 4), code.floats, align=4)
                    if updates:
                        held = code.fma(of_key, changes[i], builder.fmul(decay, held))
                        code.store(held, code.at(to, i * lanes, 4), align=4)
                    for of_one, each in zip(totals, factors, strict=True):
                        builder.store(code.fma(each, held, builder.load(of_one[i])), of_one[i])
            for which, of_one in enumerate(totals):
                for i, total in enumerate(of_one):
                    place = code.at(products, (which * joined + i) * lanes, 4)
                    code.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        words = [types.int64] * 4
        return types.void(*words, types.float32, *words), generate

    return go_on
