"""Threefry on a CPU: one operation, where XLA compiles eighty for every draw of a program."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import INTEGER, VectorCode
from jaxspec_kernels.random_words.reference import PARITY, ROTATIONS
from numba import types

_NAME = "jaxspec_random_words"


def random_words(keys: jax.Array, counters: jax.Array, *, pairs: int) -> jax.Array:
    """See `reference.random_words`. For few words: one thread, no vectors."""
    words = jax.ShapeDtypeStruct((keys.shape[0], pairs, 2), jnp.uint32)
    return jax.ffi.ffi_call(_target(), words, vmap_method="sequential")(keys, counters)


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set(), alone=True)


def _part(frame, part, parts):
    keys, counters = call.address(call.argument(frame, 0)), call.address(call.argument(frame, 1))
    rows, pairs = call.shape(call.result(frame, 0), 2)
    words = call.address(call.result(frame, 0))
    for row in range(rows):
        for pair in range(pairs):
            _encrypt(keys + 8 * row, counters + 8 * row, pair, words + 8 * (row * pairs + pair))
    return 0


@call.intrinsic
def _encrypt(typing_context, key, counter, index, result):
    """Computes pair `index`; takes the addresses of the key, of the first counter and of the result."""

    def generate(context, builder, signature, arguments):
        code = VectorCode(builder, 1)
        *bases, index, result = arguments
        k0, k1, x0, x1 = (
            code.load(code.at(base, i, 4), code.integers, align=4) for base in bases for i in range(2)
        )
        x0 = builder.add(x0, code.spread(builder.trunc(index, INTEGER)))
        for i, drawn in enumerate(threefry2x32(code, k0, k1, x0, x1)):
            code.store(drawn, code.at(result, i, 4), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def threefry2x32(code: VectorCode, k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """See `reference.threefry2x32`."""
    build = code.builder
    keys = (k0, k1, build.xor(build.xor(k0, k1), code.constant(PARITY)))
    x0, x1 = build.add(x0, k0), build.add(x1, k1)
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = build.add(x0, x1)
            left = build.shl(x1, code.constant(rotation))
            x1 = build.xor(build.or_(left, build.lshr(x1, code.constant(32 - rotation))), x0)
        x0 = build.add(x0, keys[(group + 1) % 3])
        x1 = build.add(build.add(x1, keys[(group + 2) % 3]), code.constant(group + 1))
    return x0, x1
