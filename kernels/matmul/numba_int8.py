"""Products with packed weights on a CPU, with activations rounded to 8 bits in blocks of 32 or 16 inputs.

A block of a row is d * q, where d is its largest magnitude / 127 and q are integers. Integers are multiplied
and summed exactly, with the best instruction that the processor has. Only the products with d, for each block
of the row, and with the weight's scale are in float32. All paths give the same sums bit for bit, and a row's
sums do not depend on the other rows.

llama.cpp uses blocks of 32 (ggml-quants.c, `quantize_row_q8_1_ref`). Here the inputs of queries, keys and
values have blocks of 16: with 32, likelihoods change too much (docs/measurements.md).
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import (
    BYTE,
    FLOAT,
    HALF_WORD,
    INTEGER,
    ROUND,
    ROUND_BITS,
    VectorCode,
    word,
)
from jaxspec_kernels.matmul.packed_weight import DOUBLED, QUAD, TILE, ZERO, PackedWeight
from jaxspec_kernels.matmul.weight_code import Arrays, Form, WeightCode, arrays_of, by_groups, bytes_of
from llvmlite import ir
from numba import types
from numba.core.cgutils import for_range, unpack_tuple
from numba.core.extending import intrinsic

PATHS = ("vnni512", "vnni256", "avx2", "generic")
"""Instruction sets to multiply bytes with, the fastest first."""
_NEEDS = {
    "vnni512": [{"avx512f", "avx512bw", "avx512vnni"}],
    "vnni256": [{"avxvnni"}, {"avx512vnni", "avx512vl"}],
    "avx2": [{"avx2"}],
    "generic": [set[str]()],
}
_LANES = {"vnni512": 16, "vnni256": 8, "avx2": 8, "generic": 4}
_MXFP4_ZERO = 12
_LARGEST_CODE = 127


@cache
def available_paths() -> tuple[str, ...]:
    """The paths that run on the processor that Numba compiles for, the fastest first."""
    return paths_with(call.features())


def paths_with(features: frozenset[str]) -> tuple[str, ...]:
    """The paths for a processor with these features, by LLVM's names."""
    return tuple(path for path in PATHS if any(needed <= features for needed in _NEEDS[path]))


def int8_matmul(x: jax.Array, weight: PackedWeight, *, path: str | None = None) -> jax.Array:
    """The product f32[rows, outputs] of x, rounded as described above, and a weight.

    The products of a row with NaN are NaN.

    Args:
      x: f32[rows, width].
      weight: a packed weight of form "int8", "int6", "uint8" or "mxfp4".
      path: one of `available_paths`; None for the fastest.
    """
    target = partial(_target, Form.of(weight), path or available_paths()[0], weight.row_block)
    return by_groups(x, weight, target)


class Rounded(NamedTuple):
    """Addresses of rows that are rounded to 8 bits.

    Attributes:
      codes: the integers q, bytes in their order, or 16-bit integers in which the second and third of every
        four are swapped.
      scales: f32, d of each block of a row.
      starts: i32, the initial value of the sums of each block.
      moments: f32, the sum of d * q over each piece, the inputs that share a scale of the weight.
    """

    codes: Any
    scales: Any
    starts: Any
    moments: Any


@call.njit
def allocate_rounded(rows, width, code_bytes, row_block, block):
    """Memory for `rows` rows; `block` inputs share a scale of the weight."""
    blocks, pieces = rows * (width // row_block), rows * (width // block)
    return Rounded(
        call.allocate(rows * width * code_bytes),
        call.allocate(4 * blocks),
        call.allocate(4 * blocks),
        call.allocate(4 * pieces),
    )


@call.njit
def rounded_from(rounded, row, width, code_bytes, row_block, block):
    """The rows from `row` on."""
    blocks, pieces = 4 * row * (width // row_block), 4 * row * (width // block)
    return Rounded(
        rounded.codes + row * width * code_bytes,
        rounded.scales + blocks,
        rounded.starts + blocks,
        rounded.moments + pieces,
    )


@call.once
def _target(form: Form, path: str, row_block: int, group: int) -> str:
    """Compiles and registers the kernel for a storage format and groups of `group` rows; returns its name."""
    quantize = quantize_code(form, path, row_block)
    multiply, places = multiply_code(form, path, row_block, group), form.places
    block, size_of_code = form.block, code_bytes(form, path)

    def kernel(frame, part, parts):
        x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
        rows, width = call.shape(x_, 2)
        tiles, outputs = call.shape(w_, 1)[0], call.shape(y_, 2)[1]
        y = call.floats(y_)
        # Every thread rounds all rows itself, which takes less than a hundredth of the time of the products.
        rounded = allocate_rounded(rows, width, size_of_code, row_block, block)
        quantize(call.address(x_), rows * (width // block), rounded)
        sums_at = call.allocate(4 * group * TILE)
        sums = call.floats_at(sums_at)
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            left = tile * TILE
            size = min(TILE, outputs - left)
            arrays = arrays_of(frame, places, tile, width)
            # A tile of the weight stays in the caches from one group of rows to the next.
            for top in range(0, rows, group):
                of_group = rounded_from(rounded, top, width, size_of_code, row_block, block)
                multiply(of_group, width, arrays, sums_at)
                for row in range(group):
                    for j in range(size):
                        y[(top + row) * outputs + left + j] = sums[row * TILE + j]
        for scratch in rounded:
            call.release(scratch)
        call.release(sums_at)
        return 0

    name = f"jaxspec_int8_matmul_{form.name}_{path}_{row_block}_{group}"
    return call.register(name, kernel, fastmath=set())


def sums_pairs(form: Form, path: str) -> bool:
    """Whether AVX2 multiplies bytes, and sums pairs of products in 16 bits for a while."""
    return path == "avx2" and _quads_in_16_bits(form) > 0


def _quads_in_16_bits(form: Form) -> int:
    """How many pairs of products a sum of 16 bits is sure to hold; a power of two, or 0."""
    largest = {"uint8": 15, "mxfp4": 2 * _MXFP4_ZERO, "int6": 63, "int8": 255}[form.values]
    fit = (2**15 - 1) // (2 * largest * _LARGEST_CODE)
    return 1 << fit.bit_length() - 1 if fit else 0


def code_bytes(form: Form, path: str) -> int:
    """Bytes of an integer of a row: 2 where 16-bit integers are multiplied."""
    return 1 if path.startswith("vnni") or sums_pairs(form, path) else 2


def _zero(form: Form) -> int:
    """The number that is added to a weight's integers to make them unsigned bytes."""
    return {"int8": 128, "int6": ZERO, "mxfp4": _MXFP4_ZERO}.get(form.values, 0)


def quantize_code(form: Form, path: str, row_block: int) -> Any:
    """A Numba intrinsic that rounds rows in blocks of `row_block` inputs.

    Its arguments are the address of x f32, the number of its pieces, and the `Rounded` to be written.
    """

    @intrinsic
    def quantize(typing_context, x, pieces, rounded):
        def generate(context, builder, signature, arguments):
            x, pieces, rounded = arguments
            written, code = Rounded(*unpack_tuple(builder, rounded)), VectorCode(builder, row_block)
            with for_range(builder, pieces) as loop:
                _quantize_piece(code, form, code_bytes(form, path), x, loop.index, written)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, rounded), generate

    return quantize


_SMALLEST = 2.0**-100


def _quantize_piece(code: VectorCode, form: Form, size: int, x: Any, piece: Any, written: Rounded) -> None:
    """Rounds the blocks of a row that share a scale of the weight, to integers of `size` bytes.

    A block has as many inputs as a vector has lanes.
    """
    build, blocks = code.builder, form.block // code.lanes
    total_moment = ir.Constant(FLOAT, 0.0)
    for i in range(blocks):
        block = build.add(build.mul(piece, word(blocks)), word(i))
        row = code.load(code.at(x, block, 4 * code.lanes), code.floats, align=4)
        # Magnitudes have the same order as their bits, with NaN above everything.
        sizes = build.and_(build.bitcast(row, code.integers), code.constant(0x7FFFFFFF))
        largest = build.bitcast(code.call(f"llvm.vector.reduce.umax.v{code.lanes}i32", INTEGER, sizes), FLOAT)
        scale = build.fdiv(largest, ir.Constant(FLOAT, 127.0))
        counts = build.fcmp_ordered(">", largest, ir.Constant(FLOAT, _SMALLEST))
        inverse = build.fdiv(ir.Constant(FLOAT, 127.0), largest)
        inverse = build.select(counts, inverse, ir.Constant(FLOAT, 0.0))
        code.store(scale, code.at(written.scales, block, 4), align=4)
        shifted = build.fadd(build.fmul(row, code.spread(inverse)), code.constant(ROUND))
        integers = build.sub(build.bitcast(shifted, code.integers), code.constant(ROUND_BITS))
        _store_codes(code, integers, code.at(written.codes, block, code.lanes * size), size)
        total = code.call(f"llvm.vector.reduce.add.v{code.lanes}i32", INTEGER, integers)
        start = build.mul(total, ir.Constant(INTEGER, -_zero(form)))
        code.store(start, code.at(written.starts, block, 4), align=4)
        total_moment = build.fadd(total_moment, build.fmul(build.sitofp(total, FLOAT), scale))
    code.store(total_moment, code.at(written.moments, piece, 4), align=4)


def _store_codes(code: VectorCode, integers: Any, address: Any, size: int) -> None:
    build = code.builder
    if size == 1:
        code.store(build.trunc(integers, ir.VectorType(BYTE, code.lanes)), address)
        return
    short = build.trunc(integers, ir.VectorType(HALF_WORD, code.lanes))
    order = [QUAD * quad + j for quad in range(code.lanes // QUAD) for j in (0, 2, 1, 3)]
    code.store(build.shuffle_vector(short, short, ir.Constant(code.integers, order)), address)


def multiply_code(form: Form, path: str, row_block: int, rows: int) -> Any:
    """A Numba intrinsic that computes the products of `rows` rows with one tile.

    Its arguments are the rows as `Rounded`, the width, the tile's `Arrays`, and the address of the result
    f32[rows, TILE].
    """

    @intrinsic
    def multiply(typing_context, rounded, width, arrays, result):
        def generate(context, builder, signature, arguments):
            columns = range(_columns(form, path, rows))
            outputs = len(columns) * _LANES[path]
            rounded, width, arrays, result = arguments
            of_rows, of_tile = Rounded(*unpack_tuple(builder, rounded)), Arrays.unpacked(builder, arrays)
            with for_range(builder, word(TILE // outputs)) as loop:
                first = builder.mul(loop.index, word(outputs))

                def start(base: Any, size: int) -> Any:
                    return builder.add(base, builder.mul(first, word(size)))

                sizes = (QUAD, *map(bytes_of, form.factors))
                of_columns = Arrays(*(start(*place) for place in zip(of_tile, sizes, strict=True)))
                tile = _Columns(
                    builder,
                    form,
                    path,
                    row_block,
                    rows,
                    columns,
                    of_rows,
                    of_columns,
                    width,
                    start(result, 4),
                )
                tile.generate()
            return context.get_dummy_value()

        return types.void(rounded, types.int64, arrays, types.int64), generate

    return multiply


def _columns(form: Form, path: str, rows: int) -> int:
    """How many vectors of columns go through the inputs together: as many as there are registers for their
    sums.

    A vector of AVX2 is half a cache line, and memory is read faster in whole ones.
    """
    if path == "avx2":
        return 4 if rows == 1 else 2 if sums_pairs(form, path) else 1
    return 2 if path == "vnni512" else 1


class _Columns(WeightCode):
    """Generates the code of `multiply_code` for some columns of a tile; loops within a block are unrolled."""

    def __init__(
        self,
        builder: Any,
        form: Form,
        path: str,
        row_block: int,
        rows: int,
        columns: Sequence[int],
        rounded: Rounded,
        arrays: Arrays,
        width: Any,
        y: Any,
    ):
        super().__init__(builder, form, _LANES[path], columns, arrays)
        self.path, self.row_block, self.rows = path, row_block, range(rows)
        self.sums_pairs, self.code_bytes = sums_pairs(form, path), code_bytes(form, path)
        self.shorts = ir.VectorType(HALF_WORD, 2 * self.lanes)
        self.rounded, self.width, self.y = rounded, width, y
        self.pieces = builder.udiv(width, word(form.block))

    def generate(self) -> None:
        for address in self._results():
            self.store(ir.Constant(self.floats, None), address, align=4)
        with for_range(self.builder, self.pieces) as loop:
            self._piece(loop.index)

    def _results(self) -> list[Any]:
        places = [(row, column) for row in self.rows for column in self.columns]
        return [self.at(self.y, row * TILE + column * self.lanes, 4) for row, column in places]

    def _piece(self, piece: Any) -> None:
        """Adds the products of the inputs that share a scale of the weight."""
        build, blocks = self.builder, self.form.block // self.row_block
        quads, held = self.row_block // QUAD, self.form.quads
        none: list[list[Any]] = [[None] * len(self.columns) for _ in self.rows]
        products = none
        for i in range(blocks):
            block = build.add(build.mul(piece, word(blocks)), word(i))
            sums = [self._starts(row, block) for row in self.rows]
            pairs = none
            for j in range(quads // held):
                at = build.add(build.mul(block, word(quads // held)), word(j))
                words = self.words(at)
                self.prefetch_words(at)
                for k in range(held):
                    operands = [self._operands(self._unsigned(each, k)) for each in words]
                    quad = held * j + k
                    if self.sums_pairs:
                        pairs = [self._pairs(pairs[row], operands, row, block, quad) for row in self.rows]
                        if (quad + 1) % min(quads, _quads_in_16_bits(self.form)) == 0:
                            sums = [self._widened(sums[row], pairs[row]) for row in self.rows]
                            pairs = none
                        continue
                    for row in self.rows:
                        codes = self._codes(row, block, quad)
                        both = zip(sums[row], operands, strict=True)
                        sums[row] = [self._dot(total, *operand, codes) for total, operand in both]
            products = [self._scaled(row, block, sums[row], products[row]) for row in self.rows]
        scales, offsets = self.factors(piece)
        results = iter(self._results())
        for row in self.rows:
            moment = (
                self._of_row(self.rounded.moments, row, piece, FLOAT, self.form.block) if offsets else None
            )
            for column, product in enumerate(products[row]):
                address = next(results)
                y = self.fma(product, scales[column], self.load(address, self.floats, align=4))
                if moment is not None:
                    y = self.fma(offsets[column], self.spread(moment), y)
                self.store(y, address, align=4)

    def _starts(self, row: int, block: Any) -> list[Any]:
        if not _zero(self.form):
            return [ir.Constant(self.integers, None)] * len(self.columns)
        start = self._of_row(self.rounded.starts, row, block, INTEGER, self.row_block)
        return [self.spread(start)] * len(self.columns)

    def _scaled(self, row: int, block: Any, sums: list[Any], before: list[Any]) -> list[Any]:
        """The sums of a block times its scale, in float32, added to those of the blocks before."""
        factor = self.spread(self._of_row(self.rounded.scales, row, block, FLOAT, self.row_block))
        floats = [self.builder.sitofp(total, self.floats) for total in sums]
        return [
            self.builder.fmul(value, factor) if other is None else self.fma(value, factor, other)
            for value, other in zip(floats, before, strict=True)
        ]

    def _of_row(self, base: Any, row: int, index: Any, kind: ir.Type, inputs: int) -> Any:
        """Loads a row's value for the `index`-th `inputs` inputs from the array at `base`."""
        build = self.builder
        count = build.udiv(self.width, word(inputs))
        return self.load(self.at(base, build.add(build.mul(count, word(row)), index), 4), kind, align=4)

    def _unsigned(self, words: tuple[Any, ...], quad: int) -> Any:
        """The weight's integers as four unsigned bytes per lane."""
        build = self.builder
        if self.form.values == "int6":
            return self.bytes_of_6_bits(words, quad)
        if self.form.values == "int8":
            return build.xor(words[0], self.constant(0x80808080))
        values = build.and_(build.lshr(words[0], self.constant(4 * quad)), self.constant(0x0F0F0F0F))
        return self._mxfp4(values) if self.form.values == "mxfp4" else values

    def _mxfp4(self, codes: Any) -> Any:
        """Twice the values of four codes in every lane, plus `_MXFP4_ZERO`."""
        build, vector = self.builder, ir.VectorType(BYTE, QUAD * self.lanes)
        codes = build.bitcast(codes, vector)
        if self.path == "generic":
            found = build.add(self.doubled(codes), ir.Constant(vector, [_MXFP4_ZERO] * vector.count))
        else:
            # The instruction looks up each 128 bits in 128 bits of their own.
            table = ir.Constant(vector, [int(value) + _MXFP4_ZERO for value in DOUBLED] * (self.lanes // 4))
            name = "llvm.x86.avx512.pshuf.b.512" if self.lanes == 16 else "llvm.x86.avx2.pshuf.b"
            found = self.call(name, vector, table, codes)
        return build.bitcast(found, self.integers)

    def _operands(self, weight: Any) -> tuple[Any, ...]:
        """The weight's operands of `_dot`: the bytes, or two vectors of pairs of 16-bit integers."""
        if self.code_bytes == 1:
            return (weight,)
        build, pairs = self.builder, self.constant(0x00FF00FF)
        return build.and_(weight, pairs), build.and_(build.lshr(weight, self.constant(8)), pairs)

    def _codes(self, row: int, block: Any, quad: int) -> list[Any]:
        """A row's four integers in every lane, as operands of `_dot`."""
        build, size = self.builder, self.code_bytes
        k = build.add(build.mul(block, word(self.row_block)), word(QUAD * quad))
        start = self.at(self.rounded.codes, build.add(build.mul(self.width, word(row)), k), size)
        if self.path == "generic":
            shorts = [self.load(self.at(start, i, size), HALF_WORD, align=2) for i in range(QUAD)]
            return [self.spread(build.sext(short, INTEGER)) for short in shorts]
        return [self.spread(self.load(self.at(start, i, 4), INTEGER)) for i in range(size)]

    def _dot(self, total: Any, *operands: Any) -> Any:
        """Adds the sum of four products to `total`, in every lane."""
        build = self.builder
        *weights, codes = operands
        if self.path.startswith("vnni"):
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return self._vpdpbusd(name, total, weights[0], codes[0])
        if self.path == "avx2":
            for weight, code in zip(weights, codes, strict=True):
                both = (build.bitcast(weight, self.shorts), build.bitcast(code, self.shorts))
                total = build.add(total, self.call("llvm.x86.avx2.pmadd.wd", self.integers, *both))
            return total
        low = self.constant(0xFF)
        even, odd = weights
        numbers = [build.and_(even, low), build.lshr(even, self.constant(16))]
        numbers += [build.and_(odd, low), build.lshr(odd, self.constant(16))]
        for weight, code in zip(numbers, codes, strict=True):
            total = build.add(total, build.mul(weight, code))
        return total

    def _pairs(self, before: list[Any], operands: list[Any], row: int, block: Any, quad: int) -> list[Any]:
        """The sums of both pairs of four products, in 16 bits, added to those before."""
        build, values = self.builder, ir.VectorType(BYTE, QUAD * self.lanes)
        (codes,) = self._codes(row, block, quad)

        def both(weight: Any) -> Any:
            pair = (build.bitcast(weight, values), build.bitcast(codes, values))
            return self.call("llvm.x86.avx2.pmadd.ub.sw", self.shorts, *pair)

        products = [both(weight) for (weight,) in operands]
        return [p if s is None else build.add(s, p) for s, p in zip(before, products, strict=True)]

    def _widened(self, sums: list[Any], pairs: list[Any]) -> list[Any]:
        """Adds sums of pairs in 16 bits to those of 32 bits."""
        ones = ir.Constant(self.shorts, [1] * self.shorts.count)
        wide = [self.call("llvm.x86.avx2.pmadd.wd", self.integers, pair, ones) for pair in pairs]
        return [self.builder.add(*each) for each in zip(sums, wide, strict=True)]

    def _vpdpbusd(self, name: str, total: Any, weight: Any, codes: Any) -> Any:
        return self.call(name, self.integers, total, weight, codes)
