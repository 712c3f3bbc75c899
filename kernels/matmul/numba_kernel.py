"""Products of one to eight rows on a CPU that read each weight once.

The weight is read in tiles of columns, whose sums stay in the first-level cache. A row's sums have the same
order for any number of rows, so a row that is verified among drafts equals the same row decoded alone, bit
for bit. XLA's products do not guarantee this; they are about as fast where memory bandwidth is the limit.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, VectorCode, word
from jaxspec_kernels.matmul import MIN_WEIGHT_BYTES, reference
from jaxspec_kernels.matmul.numba_int8 import int8_matmul
from jaxspec_kernels.matmul.numba_packed import packed_matmul
from jaxspec_kernels.matmul.packed_weight import PackedWeight
from numba import types
from numba.core.cgutils import for_range

MAX_ROWS = 8
TILE = 512
UNROLL = 8


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """See `jaxspec_kernels.matmul.reference`, which is called for cases that the kernels do not support."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if not (
        rows > 0
        # XLA would dequantize a packed weight in every call, which for 64 rows takes three times as long.
        and (isinstance(kernel, PackedWeight) or (rows <= MAX_ROWS and kernel.size * 4 >= MIN_WEIGHT_BYTES))
        and x.dtype == kernel.dtype == jnp.float32
        and out_dtype in (None, jnp.float32)
    ):
        return reference(x, kernel, out_dtype=out_dtype)
    if isinstance(kernel, PackedWeight):
        packed = int8_matmul if kernel.activations == "int8" else packed_matmul
        return packed(x.reshape(rows, width), kernel).reshape(*x.shape[:-1], *kernel.shape[1:])
    outputs = kernel.size // width
    y = jax.ffi.ffi_call(_target(rows), jax.ShapeDtypeStruct((rows, outputs), jnp.float32))(
        x.reshape(rows, width), kernel.reshape(width, outputs)
    )
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


@call.once
def _target(rows: int) -> str:
    """Compiles and registers the kernel for `rows` rows; returns its name."""
    lanes = 16 if "avx512f" in call.features() else 8
    add, add_singly = _add_code(rows, UNROLL, lanes), _add_code(rows, UNROLL, 1)
    add_last, add_last_singly = _add_code(rows, 1, lanes), _add_code(rows, 1, 1)

    def kernel(frame, part, parts):
        x, w = call.address(call.argument(frame, 0)), call.address(call.argument(frame, 1))
        width, outputs = call.shape(call.argument(frame, 1), 2)
        y = call.floats(call.result(frame, 0))
        sums_at = call.allocate(4 * rows * TILE)
        sums = call.floats_at(sums_at)
        start = outputs * part // parts // 16 * 16
        stop = outputs if part == parts - 1 else outputs * (part + 1) // parts // 16 * 16
        for left in range(start, stop, TILE):
            size = min(TILE, stop - left)
            vectors = size // lanes
            done = vectors * lanes
            for i in range(rows * TILE):
                sums[i] = np.float32(0)
            for k in range(0, width - (UNROLL - 1), UNROLL):
                of_k = w + 4 * (k * outputs + left)
                add(x + 4 * k, width, of_k, outputs, sums_at, vectors)
                add_singly(x + 4 * k, width, of_k + 4 * done, outputs, sums_at + 4 * done, size - done)
            for k in range(width - width % UNROLL, width):
                of_k = w + 4 * (k * outputs + left)
                add_last(x + 4 * k, width, of_k, outputs, sums_at, vectors)
                add_last_singly(x + 4 * k, width, of_k + 4 * done, outputs, sums_at + 4 * done, size - done)
            for row in range(rows):
                for j in range(size):
                    y[row * outputs + left + j] = sums[row * TILE + j]
        call.release(sums_at)
        return 0

    return call.register(f"jaxspec_matmul_float32_{rows}", kernel, fastmath=set())


def _add_code(rows: int, inputs: int, lanes: int) -> Any:
    """A Numba intrinsic that adds the products of `inputs` inputs to the sums of `rows` rows.

    Its arguments are the addresses of the first row's inputs x f32[rows, width], the width, the address of
    their weights f32[inputs, outputs], the outputs, the address of the sums f32[rows, TILE], and how many
    vectors of sums there are.
    """

    @call.intrinsic
    def add(typing_context, x, width, weights, outputs, sums, count):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, lanes)
            x, width, weights, outputs, sums, count = arguments

            def factor(row: int, i: int) -> Any:
                at = builder.add(builder.mul(width, word(row)), word(i))
                return code.spread(code.load(code.at(x, at, 4), FLOAT, align=4))

            factors = [[factor(row, i) for i in range(inputs)] for row in range(rows)]
            starts = [code.at(weights, builder.mul(outputs, word(i)), 4) for i in range(inputs)]
            with for_range(builder, count) as loop:
                columns = [
                    code.load(code.at(start, loop.index, 4 * lanes), code.floats, align=4) for start in starts
                ]
                for row in range(rows):
                    place = code.at(code.at(sums, row * TILE, 4), loop.index, 4 * lanes)
                    total = code.load(place, code.floats, align=4)
                    # A chain of additions, in the same order as the kernel for packed weights.
                    for pair in zip(factors[row], columns, strict=True):
                        total = code.fma(*pair, total)
                    code.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add
