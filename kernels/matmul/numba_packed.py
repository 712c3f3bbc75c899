"""Products with packed weights on a CPU: widened to float32 in registers, summed in the dense kernel's order.

The sums of eight rows and a tile of outputs fit into the registers of a CPU with AVX-512, so a weight is
read once and is all that is read, and LLVM's own vectors say what Numba's loops would leave to luck. With
576 x 3072 weights in four bits, two cores, one row takes 62 to 66 us and five take 127 to 137; dense, 224 to
319 and 298 to 361 (`scripts/bench_kernels.py --op matmul`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.matmul.packed_weight import BLOCK, TILE, PackedWeight
from llvmlite import ir
from numba import carray, types
from numba.core.cgutils import alloca_once, for_range, get_or_insert_function
from numba.core.extending import intrinsic

GROUP = 8
"""Rows whose sums are taken side by side."""
LANES = 16


def packed_matmul(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """f32[rows, outputs] of x f32[rows, width]."""
    arrays = [array for array in (weight.values, weight.scale, weight.offset) if array is not None]

    def product(x: jax.Array, group: int) -> jax.Array:
        y = jax.ShapeDtypeStruct((x.shape[0], weight.outputs), jnp.float32)
        return jax.ffi.ffi_call(_target(weight.form, group), y)(x, *arrays)

    whole = x.shape[0] // GROUP * GROUP
    products = [product(x[:whole], GROUP)] if whole else []
    if whole < x.shape[0]:
        products.append(product(x[whole:], x.shape[0] - whole))
    return products[0] if len(products) == 1 else jnp.concatenate(products)


@dataclass(frozen=True)
class _Form:
    """How a weight is stored.

    Attributes:
      value: LLVM's type of a value.
      inputs: how many of them one value holds.
      blocks: arrays of one number per block of inputs.
    """

    value: ir.Type
    inputs: int = 1
    blocks: int = 0


_FORMS = {
    "bfloat16": _Form(ir.IntType(16)),
    "int8": _Form(ir.IntType(8), blocks=1),
    "uint8": _Form(ir.IntType(8), inputs=2, blocks=2),
}

_PART = """
def {name}_part(frame, part, parts):
    x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
    rows, width = call.shape(x_, 2)
    tiles, outputs = call.shape(w_, 3)[0], call.shape(y_, 2)[1]
    y = carray(call.floats(y_), (rows, outputs))
    values, scale, offset = call.address(w_), {scale}, {offset}
    sums = np.empty(({group}, {TILE}), np.float32)
    for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
        left = tile * {TILE}
        size = min({TILE}, outputs - left)
        inputs = tile * width * {TILE}
        # A tile of the weight stays in the caches from one group of rows to the next.
        for top in range(0, rows, {group}):
            multiply(
                call.address(x_) + 4 * top * width,
                width,
                values + inputs * {value_bytes} // {inputs},
                scale + 4 * inputs // {BLOCK},
                offset + 4 * inputs // {BLOCK},
                sums.ctypes.data,
            )
            for row in range({group}):
                for j in range(size):
                    y[top + row, left + j] = sums[row, j]
    return 0


def {name}_handler(frame):
    return call.handle(frame, address())
"""


@call.once
def _target(form: str, group: int) -> str:
    """Compiles and registers the kernel for a form of weight and groups of so many rows; returns its name."""
    name, stored = f"jaxspec_matmul_{form}_{group}", _FORMS[form]
    scope: dict[str, Any] = {"__name__": __name__, "np": np, "carray": carray, "call": call}
    scope |= {"address": call.address_of(name), "multiply": _multiply(stored, group)}
    blocks = [f"call.address(call.argument(frame, {i}))" for i in (2, 3)]
    scale, offset = (blocks[i] if i < stored.blocks else "0" for i in range(2))
    source = _PART.format(
        name=name,
        group=group,
        scale=scale,
        offset=offset,
        inputs=stored.inputs,
        value_bytes=stored.value.width // 8,
        TILE=TILE,
        BLOCK=BLOCK,
    )
    call.define(source, __file__, scope)
    call.register(name, scope[f"{name}_part"], scope[f"{name}_handler"], fastmath=set())
    return name


_WORD, _FLOAT = ir.IntType(64), ir.FloatType()
_FLOAT_BYTES = 4
_FLOATS, _INTEGERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_COLUMNS = range(TILE // LANES)


def _multiply(form: _Form, rows: int) -> Any:
    """A function of Numba's: the products of so many rows with one tile.

    Its arguments: the address of x f32[rows, width], width, the addresses of the tile's values, scales and
    offsets, and that of the result f32[rows, TILE].
    """

    @intrinsic
    def multiply(typing_context, x, width, values, scale, offset, result):
        def generate(context, builder, signature, arguments):
            _Tile(builder, form, rows, *arguments).generate()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return multiply


class _Tile:
    """Writes the code of `_multiply`. The loops over rows and columns are written out."""

    def __init__(self, builder: Any, form: _Form, rows: int, *arguments: Any):
        self.builder, self.form, self.rows = builder, form, range(rows)
        self.x, self.width, self.values, self.scale, self.offset, self.result = arguments
        self.sums = [[alloca_once(builder, _FLOATS) for _ in _COLUMNS] for _ in self.rows]

    def generate(self) -> None:
        build = self.builder
        for sums in self.sums:
            for address in sums:
                build.store(ir.Constant(_FLOATS, None), address)
        if self.form.blocks:
            with for_range(build, build.udiv(self.width, _word(BLOCK))) as block:
                self._block(block.index)
        else:
            with for_range(build, self.width) as loop:
                self._inputs(loop.index, [], [])
        for row, sums in enumerate(self.sums):
            for column, address in enumerate(sums):
                at = self._at(self.result, _word(row * TILE + column * LANES), _FLOAT_BYTES)
                build.store(build.load(address), self._pointer(at, _FLOATS), align=4)

    def _block(self, index: Any) -> None:
        """Adds the products of the inputs that share a scale."""
        build, step = self.builder, 4
        start = build.mul(index, _word(TILE))
        scales = self._vectors(self.scale, start, _FLOAT, _FLOAT_BYTES)
        offsets = self._vectors(self.offset, start, _FLOAT, _FLOAT_BYTES) if self.form.blocks == 2 else []
        with for_range(build, _word(BLOCK // step)) as loop:
            first = build.add(build.mul(index, _word(BLOCK)), build.mul(loop.index, _word(step)))
            for i in range(0, step, self.form.inputs):
                self._inputs(build.add(first, _word(i)), scales, offsets)

    def _inputs(self, k: Any, scales: Sequence[Any], offsets: Sequence[Any]) -> None:
        """Adds the products of input k, and of those whose values lie with its own."""
        build = self.builder
        row = build.mul(build.udiv(k, _word(self.form.inputs)), _word(TILE))
        stored = self._vectors(self.values, row, self.form.value, self.form.value.width // 8)
        for part in range(self.form.inputs):
            weights = [self._widened(vector, part) for vector in stored]
            if offsets:
                weights = [self._fma(*terms) for terms in zip(weights, scales, offsets, strict=True)]
            elif scales:
                weights = [build.fmul(*terms) for terms in zip(weights, scales, strict=True)]
            for i, sums in zip(self.rows, self.sums, strict=True):
                at = build.add(build.mul(self.width, _word(i)), build.add(k, _word(part)))
                x = self._spread(build.load(self._pointer(self._at(self.x, at, _FLOAT_BYTES), _FLOAT)))
                for weight, address in zip(weights, sums, strict=True):
                    build.store(self._fma(x, weight, build.load(address)), address)

    def _widened(self, vector: Any, part: int) -> Any:
        """The float32 of bfloat16s, of bytes, or of one half of bytes."""
        build = self.builder
        if self.form.value.width == 16:
            shifted = build.shl(build.zext(vector, _INTEGERS), ir.Constant(_INTEGERS, [16] * LANES))
            return build.bitcast(shifted, _FLOATS)
        if self.form.inputs == 1:
            return build.sitofp(build.sext(vector, _INTEGERS), _FLOATS)
        cut, amount = (build.lshr, 4) if part else (build.and_, 15)
        wide = build.zext(vector, _INTEGERS)
        return build.sitofp(cut(wide, ir.Constant(_INTEGERS, [amount] * LANES)), _FLOATS)

    def _vectors(self, base: Any, index: Any, kind: ir.Type, size: int) -> list[Any]:
        """The vectors of a row of TILE elements of `size` bytes that begins at element `index`."""
        build, vector = self.builder, ir.VectorType(kind, LANES)
        addresses = [self._at(base, build.add(index, _word(LANES * i)), size) for i in _COLUMNS]
        return [build.load(self._pointer(address, vector), align=size) for address in addresses]

    def _at(self, base: Any, index: Any, size: int) -> Any:
        return self.builder.add(base, self.builder.mul(index, _word(size)))

    def _pointer(self, address: Any, kind: ir.Type) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        function = get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32")
        return self.builder.call(function, [a, b, c])

    def _spread(self, value: Any) -> Any:
        """A vector with the same value in every lane."""
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(_INTEGERS, [0] * LANES))


def _word(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)
