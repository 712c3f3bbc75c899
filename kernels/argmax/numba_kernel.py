"""Argmax on a CPU in one pass over the logits, with noise that is computed in registers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.argmax import reference
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, INTEGER, VectorCode, word
from jaxspec_kernels.random_words.numba_kernel import threefry2x32
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range

_LANES = 16
_SMALL = 1 << 14
"""The most logits that one thread goes through alone."""


def argmax(x: jax.Array, axis: str | None = None) -> jax.Array:
    """See `reference.argmax`, which computes other cases."""
    if axis is not None or x.dtype != jnp.float32 or not x.size:
        return reference.argmax(x, axis)
    rows = x.reshape(-1, x.shape[-1])
    return _call(rows, noisy=False).reshape(x.shape[:-1])


def gumbel_argmax(
    logits: jax.Array, keys: jax.Array, sampled: jax.Array, axis: str | None = None
) -> jax.Array:
    """See `reference.gumbel_argmax`, which computes other cases."""
    if axis is not None or logits.dtype != jnp.float32 or not logits.size:
        return reference.gumbel_argmax(logits, keys, sampled, axis)
    return _call(logits, keys, sampled.astype(jnp.int32), noisy=True)


def row_max(x: jax.Array) -> jax.Array:
    """See `reference.row_max`. A greedy program has the argmax anyway, and alone it takes half as long."""
    if x.dtype != jnp.float32 or not x.size:
        return reference.row_max(x)
    return jnp.take_along_axis(x, argmax(x)[..., None], axis=-1, mode="promise_in_bounds")[..., 0]


def _call(x: jax.Array, *arrays: jax.Array, noisy: bool) -> jax.Array:
    rows = x.shape[0]
    target = _target(noisy, rows == 1 or x.size <= _SMALL)
    best = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return jax.ffi.ffi_call(target, best, vmap_method="sequential")(x, *arrays)


@call.once
def _target(noisy: bool, alone: bool) -> str:
    """Compiles and registers the kernel; returns its name."""
    blocks, pair, single = _best_code(_LANES, 2, False), _best_code(1, 2, False), _best_code(1, 1, False)
    noisy_blocks, noisy_pair, noisy_single = (
        _best_code(lanes, words, True) for lanes, words in ((_LANES, 2), (1, 2), (1, 1))
    )

    def kernel(frame, part, parts):
        x = call.address(call.argument(frame, 0))
        rows, width = call.shape(call.argument(frame, 0), 2)
        ids = call.integers(call.result(frame, 0))
        # The best score of a row and its id stay in memory from one piece of the row to the next.
        best = call.allocate(8)
        value, index = call.floats_at(best), call.integers_at(best + 4)
        pairs = width // 2
        whole = pairs // _LANES * _LANES
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            value[0], index[0] = -np.inf, 0
            logits = x + 4 * width * row
            if noisy and call.integers(call.argument(frame, 2))[row]:
                key = call.address(call.argument(frame, 1)) + 8 * row
                noisy_blocks(logits, key, 0, whole // _LANES, best)
                noisy_pair(logits, key, whole, pairs - whole, best)
                noisy_single(logits, key, pairs, width % 2, best)
            else:
                blocks(logits, 0, 0, whole // _LANES, best)
                pair(logits, 0, whole, pairs - whole, best)
                single(logits, 0, pairs, width % 2, best)
            ids[row] = index[0]
        call.release(best)
        return 0

    name = f"jaxspec_{'gumbel_' * noisy}argmax_{'alone' if alone else 'shared'}"
    return call.register(name, kernel, fastmath=set(), alone=alone)


def _best_code(lanes: int, words: int, noisy: bool) -> Any:
    """A Numba intrinsic that looks for the best score in consecutive blocks of `words` x `lanes` logits.

    Its arguments are the addresses of the row's logits and key, the index of the first pair of logits, the
    number of blocks, and the address of the best score f32 so far and its id i32, which are replaced.
    """

    @call.intrinsic
    def best_of(typing_context, logits, key, first, count, best):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            logits, key, first, count, best = arguments
            keys = [code.spread(code.load(code.at(key, i, 4), INTEGER)) for i in range(2)] if noisy else []
            value = code.spread(code.load(best, FLOAT, align=4))
            index = code.spread(code.load(code.at(best, 1, 4), INTEGER, align=4))
            # A vector of a block has its own best, so that it does not wait for the other.
            values = [alloca_once_value(builder, value) for _ in range(words)]
            indices = [alloca_once_value(builder, index) for _ in range(words)]
            lane = ir.Constant(code.integers, list(range(lanes)))
            with for_range(builder, count) as loop:
                pair = builder.add(first, builder.mul(loop.index, word(lanes)))
                left = builder.mul(pair, word(2))
                noise = _noise(code, keys, builder.add(code.spread(builder.trunc(pair, INTEGER)), lane))
                for i in range(words):
                    score = code.load(
                        code.at(logits, builder.add(left, word(i * lanes)), 4), code.floats, align=4
                    )
                    if noisy:
                        score = builder.fadd(score, noise[i])
                    at = builder.add(code.spread(builder.trunc(left, INTEGER)), lane)
                    at = builder.add(at, code.constant(i * lanes))
                    better = _is_better(builder, score, builder.load(values[i]))
                    builder.store(builder.select(better, score, builder.load(values[i])), values[i])
                    builder.store(builder.select(better, at, builder.load(indices[i])), indices[i])
            found = [(builder.load(v), builder.load(i)) for v, i in zip(values, indices, strict=True)]
            value, index = _first_best(code, found)
            code.store(value, best, align=4)
            code.store(index, code.at(best, 1, 4), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return best_of


def _is_better(builder: Any, score: Any, best: Any) -> Any:
    """Whether scores replace the best so far: they are greater, or NaN, which the best is not."""
    is_number = builder.fcmp_ordered("ord", best, best)
    return builder.and_(builder.fcmp_unordered(">", score, best), is_number)


def _first_best(code: VectorCode, found: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The best of all lanes of vectors of scores and ids, and its id; of equal ones the first."""
    build = code.builder
    of_lanes = [
        [build.extract_element(vector, ir.Constant(INTEGER, lane)) for vector in pair]
        for pair in found
        for lane in range(code.lanes)
    ]
    value, index = of_lanes[0]
    for score, at in of_lanes[1:]:
        both_nan = build.fcmp_unordered("uno", score, score)
        both_nan = build.and_(both_nan, build.fcmp_unordered("uno", value, value))
        equal = build.or_(build.fcmp_ordered("==", score, value), both_nan)
        better = build.or_(
            _is_better(build, score, value), build.and_(equal, build.icmp_signed("<", at, index))
        )
        value, index = build.select(better, score, value), build.select(better, at, index)
    return value, index


def _noise(code: VectorCode, keys: list[Any], pair: Any) -> list[Any]:
    """Gumbel noise of the two vectors of logits that start at pairs of words; see `random.gumbel`."""
    if not keys:
        return []
    x0, x1 = threefry2x32(code, keys[0], keys[1], pair, code.constant(0))
    # Word 2j is the first of pair j, and word 2j + 1 the second.
    order = [lane + i * code.lanes for lane in range(code.lanes) for i in range(2)]
    halves = (order[: code.lanes], order[code.lanes :])
    return [
        gumbel(code, code.builder.shuffle_vector(x0, x1, ir.Constant(code.integers, half))) for half in halves
    ]


def gumbel(code: VectorCode, words: Any) -> Any:
    """Gumbel noise from random words; see `random.uniform` and `random.gumbel`."""
    build, constant = code.builder, code.constant
    uniform = build.fmul(build.fadd(build.uitofp(words, code.floats), constant(0.5)), constant(2.0**-32))
    largest = constant(1.0 - 2.0**-24)
    uniform = build.select(build.fcmp_ordered("<", uniform, largest), uniform, largest)
    # log(1 - u) with what 1 - u loses by rounding.
    rest = build.fsub(constant(1.0), uniform)
    lost = build.fsub(uniform, build.fsub(constant(1.0), rest))
    exponential = build.fsub(lost, code.log(rest))
    return build.fneg(code.log(exponential))
