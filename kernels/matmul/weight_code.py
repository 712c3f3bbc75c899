"""Parts of the kernels for packed weights: the storage format, and code that reads it into vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.calls.vector_code import BYTE, FLOAT, HALF, VectorCode, word
from jaxspec_kernels.matmul.packed_weight import QUAD, TILE, PackedWeight
from llvmlite import ir
from numba.core.cgutils import unpack_tuple

GROUP = 8
"""Rows whose sums are computed together."""
AHEAD = 4096
"""Distance of prefetches, in bytes: a page, because hardware prefetching stops at page boundaries."""
_KINDS = {"float16": HALF, "float32": FLOAT}


@dataclass(frozen=True)
class Form:
    """How a weight is stored; see `PackedWeight`.

    Attributes:
      values: "bfloat16", "int8", "int6", "uint8" or "mxfp4".
      factors: dtypes of scale, offset, and the units of both; each may be None.
      block: inputs that share a scale.
      per_unit: scales that share a unit; 0 without units.
    """

    values: str
    factors: tuple[str | None, ...]
    block: int
    per_unit: int

    @classmethod
    def of(cls, weight: PackedWeight) -> "Form":
        dtypes = tuple(None if array is None else str(array.dtype) for array in weight.factors)
        return cls(weight.form, dtypes, weight.block, weight.per_unit)

    @property
    def name(self) -> str:
        return "_".join(map(str, (self.values, *self.factors, self.block, self.per_unit)))

    @property
    def arrays(self) -> int:
        """The number of arrays that hold the weight."""
        return 1 + sum(kind is not None for kind in self.factors)

    @property
    def words(self) -> int:
        """Words of 32 bits of an output that are read together."""
        return 3 if self.values == "int6" else 1

    @property
    def quads(self) -> int:
        """Groups of four inputs that these words hold."""
        return {"uint8": 2, "mxfp4": 2, "int6": 4}.get(self.values, 1)

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """For each of `Arrays`: its operand, a number of bytes, and the number of a tile's inputs that they
        hold. The first operand is 1; an array that the weight lacks has operand 0.
        """
        values = (QUAD * TILE * self.words, QUAD * self.quads)
        places = [(1, *((2 * TILE, 1) if self.values == "bfloat16" else values))]
        of_unit = self.block * self.per_unit
        for kind, inputs in zip(self.factors, (self.block, self.block, of_unit, of_unit), strict=True):
            operand = 0 if kind is None else 1 + sum(place[0] > 0 for place in places)
            places.append((operand, TILE * bytes_of(kind), max(inputs, 1)))
        return tuple(places)


class Arrays(NamedTuple):
    """Addresses of the arrays that hold a tile of a weight (see `PackedWeight`); 0 for one that is absent."""

    values: Any
    scale: Any
    offset: Any
    scale_unit: Any
    offset_unit: Any

    @classmethod
    def unpacked(cls, builder: Any, arrays: Any) -> "Arrays":
        """From a value of LLVM's."""
        return cls(*unpack_tuple(builder, arrays))


@call.njit
def arrays_of(frame, places, tile, width):
    """The `Arrays` of a tile of a weight of `width` inputs, whose `Form.places` are `places`."""
    values, scale, offset, scale_unit, offset_unit = places
    return Arrays(
        _tile_at(frame, values, tile, width),
        _tile_at(frame, scale, tile, width),
        _tile_at(frame, offset, tile, width),
        _tile_at(frame, scale_unit, tile, width),
        _tile_at(frame, offset_unit, tile, width),
    )


@call.njit
def _tile_at(frame, place, tile, width):
    operand, size, inputs = place
    if operand == 0:
        return 0
    return call.address(call.argument(frame, operand)) + tile * (width // inputs * size)


def bytes_of(kind: str | None) -> int:
    """Bytes of an element of `PackedWeight.factors`; 0 if there is none."""
    return 0 if kind is None else np.dtype(kind).itemsize


def by_groups(x: jax.Array, weight: PackedWeight, target: Any) -> jax.Array:
    """The product f32[rows, outputs] of x f32[rows, width] and a weight, in groups of up to GROUP rows.

    Args:
      target: returns the name of the kernel for a group of so many rows.
    """
    arrays = [array for array in (weight.values, *weight.factors) if array is not None]

    def product(x: jax.Array, group: int) -> jax.Array:
        y = jax.ShapeDtypeStruct((x.shape[0], weight.outputs), jnp.float32)
        return jax.ffi.ffi_call(target(group), y)(x, *arrays)

    whole = x.shape[0] // GROUP * GROUP
    products = [product(x[:whole], GROUP)] if whole else []
    if whole < x.shape[0]:
        products.append(product(x[whole:], x.shape[0] - whole))
    return products[0] if len(products) == 1 else jnp.concatenate(products)


class WeightCode(VectorCode):
    """Reads columns of a tile; a column is as many outputs as a vector has lanes.

    Args:
      form: the weight's storage format.
      lanes: lanes of a vector.
      columns: indices of the columns to read.
      arrays: the tile's arrays.
    """

    def __init__(self, builder: Any, form: Form, lanes: int, columns: Sequence[int], arrays: Arrays):
        super().__init__(builder, lanes)
        self.form, self.columns, self.arrays = form, columns, arrays

    def words(self, index: Any) -> list[tuple[Any, ...]]:
        """The words that hold the `index`-th `QUAD * quads` inputs of every output, for each column."""
        build, count = self.builder, self.form.words
        rows = [build.add(build.mul(index, word(count)), word(i)) for i in range(count)]
        loaded = [
            [self.load(a, self.integers) for a in self._row(self.arrays.values, row, QUAD)] for row in rows
        ]
        return list(zip(*loaded, strict=True))

    def prefetch_words(self, index: Any) -> None:
        """Asks for the values AHEAD bytes past the words of `index`, where the weight may have ended."""
        size = TILE * QUAD * self.form.words
        start = self.at(self.arrays.values, index, size)
        for line in range(0, size, 64):
            # Prefetches into the first cache take up the buffers that loads wait in.
            self.prefetch(self.builder.add(start, word(AHEAD + line)), into=2)

    def bytes_of_6_bits(self, words: tuple[Any, ...], quad: int) -> Any:
        """The `quad`-th four integers in three words, as bytes from 0 to 63."""
        build, shift = self.builder, 2 * quad - 4
        low = build.and_(build.lshr(words[quad // 2], self.constant(quad % 2 * 4)), self.constant(0x0F0F0F0F))
        high = build.shl(words[2], self.constant(-shift)) if shift < 0 else words[2]
        high = build.lshr(high, self.constant(shift)) if shift > 0 else high
        return build.or_(low, build.and_(high, self.constant(0x30303030)))

    def factors(self, block: Any) -> tuple[list[Any], list[Any]]:
        """The scales and the offsets of a block, a vector for each column; empty if the form has none."""
        scale, offset, scale_unit, offset_unit = self.form.factors
        scales = self._floats(self.arrays.scale, scale, block)
        offsets = self._floats(self.arrays.offset, offset, block)
        if not self.form.per_unit:
            return scales, offsets
        unit = self.builder.udiv(block, word(self.form.per_unit))
        scale_units = self._floats(self.arrays.scale_unit, scale_unit, unit)
        offset_units = self._floats(self.arrays.offset_unit, offset_unit, unit)
        return self._times(scales, scale_units), self._times(offsets, offset_units)

    def _times(self, factors: list[Any], units: list[Any]) -> list[Any]:
        return [self.builder.fmul(*pair) for pair in zip(factors, units, strict=True)]

    def _floats(self, base: Any, kind: str | None, block: Any) -> list[Any]:
        if kind is None:
            return []
        addresses = self._row(base, block, bytes_of(kind))
        if kind == "uint8":
            return [self._powers_of_2(address) for address in addresses]
        if kind == "int8":
            return [self._small_integers(address) for address in addresses]
        return [self.floats_at(address, _KINDS[kind]) for address in addresses]

    def _small_integers(self, address: Any) -> Any:
        """Bytes at an address as float32."""
        build = self.builder
        wide = build.sext(self.load(address, ir.VectorType(BYTE, self.lanes)), self.integers)
        return build.sitofp(wide, self.floats)

    def _powers_of_2(self, address: Any) -> Any:
        """Powers of 2 in float32 from the bytes at an address, which are their exponent bits."""
        build = self.builder
        exponents = build.zext(self.load(address, ir.VectorType(BYTE, self.lanes)), self.integers)
        return build.bitcast(build.shl(exponents, self.constant(23)), self.floats)

    def doubled(self, codes: Any) -> Any:
        """Twice the values of MXFP4 codes, -12 to 12, in a vector of the same integer type."""
        build = self.builder

        def constant(value: int) -> ir.Constant:
            return ir.Constant(codes.type, [value] * codes.type.count)

        def past(limit: int) -> Any:
            beyond = build.sub(size, constant(limit))
            return build.select(build.icmp_unsigned(">", size, constant(limit)), beyond, constant(0))

        # The sizes 0 to 7 stand for 0, 1, 2, 3, 4, 6, 8 and 12.
        size = build.and_(codes, constant(7))
        last = past(6)
        value = build.add(build.add(size, past(4)), build.add(last, last))
        is_negative = build.icmp_unsigned(">", codes, constant(7))
        return build.select(is_negative, build.sub(constant(0), value), value)

    def _row(self, base: Any, index: Any, size: int) -> list[Any]:
        """Addresses of the columns in row `index` of TILE elements of `size` bytes."""
        start = self.at(base, index, TILE * size)
        return [self.at(start, column * self.lanes, size) for column in self.columns]
