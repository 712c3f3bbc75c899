"""Temperature, min-p, top-k and top-p on a CPU: one operation, which searches only in rows that need it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, VectorCode
from jaxspec_kernels.process_logits.reference import process_logits as reference
from numba import types
from numba.core.cgutils import alloca_once_value, for_range

_LANES = 16
_NAME = "jaxspec_process_logits"
_TINY = float(np.finfo(np.float32).tiny)
_BINS = 1 << 12
"""The most bins of a search."""


def process_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    truncated: bool,
) -> jax.Array:
    """See `reference.process_logits`, which computes other cases."""
    if not logits.size:
        return reference(logits, temperature, top_k, top_p, min_p, truncated=truncated)
    if not truncated:
        top_k, top_p = jnp.zeros_like(top_k), jnp.ones_like(top_p)
    processed = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    kernel = jax.ffi.ffi_call(_target(), processed, vmap_method="sequential")
    return kernel(logits, temperature, top_k, top_p, jnp.log(min_p))


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set())


def _part(frame, part, parts):
    logits, processed = call.argument(frame, 0), call.result(frame, 0)
    slots, rows, width = call.shape(logits, 3)
    temperatures, top_k = call.floats(call.argument(frame, 1)), call.integers(call.argument(frame, 2))
    top_p, log_min_p = call.floats(call.argument(frame, 3)), call.floats(call.argument(frame, 4))
    weights_at, sums_at, peak_at = call.allocate(4 * width), call.allocate(8 * _BINS), call.allocate(4)
    weights, peak = call.floats_at(weights_at), call.floats_at(peak_at)
    whole = width // _LANES
    for row in range(slots * rows * part // parts, slots * rows * (part + 1) // parts):
        slot = row // rows
        x, y = call.address(logits) + 4 * width * row, call.address(processed) + 4 * width * row
        is_sampled = temperatures[slot] > 0
        divisor = temperatures[slot] if is_sampled else np.float32(1)
        peak[0] = -np.inf
        _scale(x, divisor, whole, y, peak_at)
        left = 4 * _LANES * whole
        _scale_singly(x + left, divisor, width - _LANES * whole, y + left, peak_at)
        if not is_sampled:
            continue
        scaled, order = call.floats_at(y), call.integers_at(y)
        floor = peak[0] + log_min_p[slot]
        if 0 < top_k[slot] < width:
            for i in range(width):
                weights[i] = np.float32(1)
            floor = max(floor, _reaching(order, weights, width, float(top_k[slot]), sums_at))
        if top_p[slot] < 1:
            _powers(y, peak[0], whole, weights_at)
            _powers_singly(y + left, peak[0], width - _LANES * whole, weights_at + left)
            total = 0.0
            for i in range(width):
                if scaled[i] >= floor:
                    total += weights[i]
            mass = max(top_p[slot] * total, _TINY)
            floor = max(floor, _reaching(order, weights, width, mass, sums_at))
        for i in range(width):
            if scaled[i] < floor:
                scaled[i] = -np.inf
    for scratch in (weights_at, sums_at, peak_at):
        call.release(scratch)
    return 0


@call.inlined
def _reaching(order, weights, width, wanted, sums_at):
    """The largest threshold at or above which floats weigh `wanted` or more; -inf if all of them weigh less.

    Args:
      order: i32[V], the floats' bits.
      weights: f32[V].
      width: V.
      sums_at: the address of f64[_BINS], which is overwritten.
    """
    sums = call.doubles_at(sums_at)
    above, found = 0.0, 0
    # The highest 12 bits of the floats' order are found first, then ten more, and ten more.
    for level in range(3):
        shift, bins = 20 - 10 * level, _BINS if level == 0 else 1 << 10
        for i in range(bins):
            sums[i] = 0.0
        for i in range(width):
            key: Any = np.int64(order[i])
            key = key + (1 << 31) if key >= 0 else -key - 1
            if level == 0 or key >> (shift + 10) == found:
                sums[(key >> shift) & (bins - 1)] += weights[i]
        digit = bins - 1
        while digit > 0 and not above + sums[digit] >= wanted:
            above += sums[digit]
            digit -= 1
        if level == 0 and not above + sums[digit] >= wanted:
            return np.float32(-np.inf)
        found = (found << (12 if level == 0 else 10)) | digit
    call.integers_at(sums_at)[0] = found - (1 << 31) if found >= 1 << 31 else -found - 1
    return call.floats_at(sums_at)[0]


def _scale_code(lanes: int) -> Any:
    """A Numba intrinsic that divides floats by a number and finds the largest quotient.

    Its arguments are the address of x f32, the divisor f32, the number of vectors, the address of the result,
    and that of the largest quotient so far f32[1], which is replaced. NaN is not larger than a number.
    """

    @call.intrinsic
    def scale(typing_context, x, divisor, count, result, peak):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            x, divisor, count, result, peak = arguments
            divisor = code.spread(divisor)
            largest = alloca_once_value(builder, code.spread(code.load(peak, FLOAT, align=4)))
            with for_range(builder, count) as loop:
                row = code.load(code.at(x, loop.index, 4 * lanes), code.floats, align=4)
                row = builder.fdiv(row, divisor)
                code.store(row, code.at(result, loop.index, 4 * lanes), align=4)
                builder.store(code.larger(row, builder.load(largest)), largest)
            code.store(code.folded(builder.load(largest), code.larger), peak, align=4)
            return context.get_dummy_value()

        kinds = (types.int64, types.float32, types.int64, types.int64, types.int64)
        return types.void(*kinds), generate

    return scale


def _powers_code(lanes: int) -> Any:
    """A Numba intrinsic that computes exp(x - peak).

    Its arguments are the address of x f32, the peak f32, the number of vectors, and the address of the
    result.
    """

    @call.intrinsic
    def powers(typing_context, x, peak, count, result):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            x, peak, count, result = arguments
            peak = code.spread(peak)
            with for_range(builder, count) as loop:
                row = code.load(code.at(x, loop.index, 4 * lanes), code.floats, align=4)
                code.store(code.exp(builder.fsub(row, peak)), code.at(result, loop.index, 4 * lanes), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64), generate

    return powers


_scale, _scale_singly = _scale_code(_LANES), _scale_code(1)
_powers, _powers_singly = _powers_code(_LANES), _powers_code(1)
