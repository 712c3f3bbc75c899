"""Products with packed weights on a CPU: widened to float32 in registers, summed in the dense kernel's order.

The sums of eight rows and a tile of outputs fit into the registers of a CPU with AVX-512, so each weight is
read from memory once. The vector code is generated (`vector_code.py`).
"""

from functools import partial
from typing import Any

import jax
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import FLOAT, HALF_WORD, word
from jaxspec_kernels.matmul.packed_weight import QUAD, TILE, ZERO, PackedWeight
from jaxspec_kernels.matmul.weight_code import Arrays, Form, WeightCode, arrays_of, by_groups
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once, for_range
from numba.core.extending import intrinsic

LANES = 16


def packed_matmul(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """The product f32[rows, outputs] of x f32[rows, width] and a weight."""
    return by_groups(x, weight, partial(_target, Form.of(weight)))


@call.once
def _target(form: Form, group: int) -> str:
    """Compiles and registers the kernel for a storage format and groups of `group` rows; returns its name."""
    multiply, places = multiply_code(form, group), form.places

    def kernel(frame, part, parts):
        x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
        rows, width = call.shape(x_, 2)
        tiles, outputs = call.shape(w_, 1)[0], call.shape(y_, 2)[1]
        y = call.floats(y_)
        sums_at = call.allocate(4 * group * TILE)
        sums = call.floats_at(sums_at)
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            left = tile * TILE
            size = min(TILE, outputs - left)
            arrays = arrays_of(frame, places, tile, width)
            # A tile of the weight stays in the caches from one group of rows to the next.
            for top in range(0, rows, group):
                multiply(call.address(x_) + 4 * top * width, width, arrays, sums_at)
                for row in range(group):
                    for j in range(size):
                        y[(top + row) * outputs + left + j] = sums[row * TILE + j]
        call.release(sums_at)
        return 0

    return call.register(f"jaxspec_matmul_{form.name}_{group}", kernel, fastmath=set())


def multiply_code(form: Form, rows: int) -> Any:
    """A Numba intrinsic that computes the products of `rows` rows with one tile.

    Its arguments are the address of x f32[rows, width], the width, the tile's `Arrays`, and the address of
    the result f32[rows, TILE].
    """

    @intrinsic
    def multiply(typing_context, x, width, arrays, result):
        def generate(context, builder, signature, arguments):
            x, width, arrays, result = arguments
            _Tile(builder, form, rows, x, width, Arrays.unpacked(builder, arrays), result).generate()
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, arrays, types.int64), generate

    return multiply


class _Tile(WeightCode):
    """Generates the code of `multiply_code`, with the loops over rows and columns unrolled."""

    def __init__(self, builder: Any, form: Form, rows: int, x: Any, width: Any, arrays: Arrays, y: Any):
        super().__init__(builder, form, LANES, range(TILE // LANES), arrays)
        self.x, self.width, self.y, self.rows = x, width, y, range(rows)
        self.sums = [[alloca_once(builder, self.floats) for _ in self.columns] for _ in self.rows]

    def generate(self) -> None:
        build = self.builder
        for sums in self.sums:
            for address in sums:
                build.store(ir.Constant(self.floats, None), address)
        if self.form.values != "bfloat16":
            with for_range(build, build.udiv(self.width, word(self.form.block))) as block:
                self._block(block.index)
        else:
            with for_range(build, self.width) as loop:
                self._add(loop.index, self._bfloat16(loop.index))
        for row, sums in enumerate(self.sums):
            for column, address in enumerate(sums):
                at = self.at(self.y, row * TILE + column * LANES, 4)
                self.store(build.load(address), at, align=4)

    def _block(self, index: Any) -> None:
        """Adds the products of the inputs that share a scale."""
        build, held = self.builder, QUAD * self.form.quads
        scales, offsets = self.factors(index)
        with for_range(build, word(self.form.block // held)) as loop:
            at = build.add(build.mul(index, word(self.form.block // held)), loop.index)
            words = self.words(at)
            for i in range(held):
                weights = [build.sitofp(self._integers(vector, i), self.floats) for vector in words]
                if offsets:
                    weights = [self.fma(*terms) for terms in zip(weights, scales, offsets, strict=True)]
                else:
                    weights = [build.fmul(*terms) for terms in zip(weights, scales, strict=True)]
                self._add(build.add(build.mul(at, word(held)), word(i)), weights)

    def _add(self, k: Any, weights: list[Any]) -> None:
        """Adds the products of input k."""
        build = self.builder
        for i, sums in zip(self.rows, self.sums, strict=True):
            at = build.add(build.mul(self.width, word(i)), k)
            x = self.spread(self.load(self.at(self.x, at, 4), FLOAT, align=4))
            for weight, address in zip(weights, sums, strict=True):
                build.store(self.fma(x, weight, build.load(address)), address)

    def _integers(self, words: tuple[Any, ...], i: int) -> Any:
        """Input i of vectors of words, as integers."""
        build = self.builder
        if self.form.values == "int6":
            four = build.lshr(self.bytes_of_6_bits(words, i // QUAD), self.constant(i % QUAD * 8))
            return build.sub(build.and_(four, self.constant(63)), self.constant(ZERO))
        (words,) = words
        if self.form.values == "int8":
            return build.ashr(build.shl(words, self.constant(24 - 8 * i)), self.constant(24))
        values = build.and_(build.lshr(words, self.constant(i % QUAD * 8 + i // QUAD * 4)), self.constant(15))
        return self.doubled(values) if self.form.values == "mxfp4" else values

    def _bfloat16(self, k: Any) -> list[Any]:
        build, vector = self.builder, ir.VectorType(HALF_WORD, self.lanes)
        stored = [self.load(address, vector, align=2) for address in self._row(self.arrays.values, k, 2)]
        wide = [build.shl(build.zext(bits, self.integers), self.constant(16)) for bits in stored]
        return [build.bitcast(bits, self.floats) for bits in wide]
