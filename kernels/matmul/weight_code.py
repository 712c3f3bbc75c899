"""What the kernels of packed weights share: how a weight is stored, and reading it into vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels.matmul.packed_weight import QUAD, TILE, PackedWeight
from jaxspec_kernels.matmul.vector_code import BYTE, FLOAT, HALF, INTEGER, VectorCode, word
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

GROUP = 8
"""Rows whose sums are taken side by side."""
AHEAD = 4096
"""Bytes from what is read to what is asked for: a page, at whose end the processor stops looking ahead."""
_SECOND_CACHE = 2
"""Of `llvm.prefetch`: asking for it in the first cache takes up what loads wait in."""
_KINDS = {"float16": HALF, "float32": FLOAT}


@dataclass(frozen=True)
class Form:
    """How a weight is stored; see `PackedWeight`.

    Attributes:
      values: "bfloat16", "int8" or "uint8".
      scale, offset: dtypes, or None.
      block: inputs that share a scale.
    """

    values: str
    scale: str | None
    offset: str | None
    block: int

    @classmethod
    def of(cls, weight: PackedWeight) -> "Form":
        scale, offset = (None if a is None else str(a.dtype) for a in (weight.scale, weight.offset))
        return cls(weight.form, scale, offset, weight.block)

    @property
    def name(self) -> str:
        return "_".join(str(part) for part in (self.values, self.scale, self.offset, self.block))

    @property
    def quads(self) -> int:
        """Groups of four inputs that a word of 32 bits holds."""
        return 2 if self.values == "uint8" else 1

    def byte_offsets(self) -> dict[str, str]:
        """Expressions for `{values}`, `{scale}` and `{offset}` in a kernel's source: where those of `tile`
        begin."""
        width = {"bfloat16": "2 * width", "int8": "width", "uint8": "width // 2"}[self.values]
        places = {"values": f"call.address(call.argument(frame, 1)) + tile * {TILE} * ({width})"}
        for i, name in enumerate(("scale", "offset")):
            kind = getattr(self, name)
            at = f"tile * {TILE * bytes_of(kind)} * (width // {self.block})"
            places[name] = f"call.address(call.argument(frame, {i + 2})) + {at}" if kind else "0"
        return places


def bytes_of(kind: str | None) -> int:
    """Of a number of a scale or an offset; 0 where there is none."""
    return {None: 0, "float16": 2, "float32": 4}[kind]


def by_groups(x: jax.Array, weight: PackedWeight, target: Any) -> jax.Array:
    """f32[rows, outputs] of x f32[rows, width], by the kernels that `target(rows of a group)` names."""
    arrays = [array for array in (weight.values, weight.scale, weight.offset) if array is not None]

    def product(x: jax.Array, group: int) -> jax.Array:
        y = jax.ShapeDtypeStruct((x.shape[0], weight.outputs), jnp.float32)
        return jax.ffi.ffi_call(target(group), y)(x, *arrays)

    whole = x.shape[0] // GROUP * GROUP
    products = [product(x[:whole], GROUP)] if whole else []
    if whole < x.shape[0]:
        products.append(product(x[whole:], x.shape[0] - whole))
    return products[0] if len(products) == 1 else jnp.concatenate(products)


class WeightCode(VectorCode):
    """Reads some columns of a tile, each as wide as a vector.

    Args:
      form: of the weight.
      lanes: of a vector.
      columns: which of the tile's.
      values, scale, offset: addresses of the tile's.
    """

    def __init__(
        self,
        builder: Any,
        form: Form,
        lanes: int,
        columns: Sequence[int],
        values: Any,
        scale: Any,
        offset: Any,
    ):
        super().__init__(builder, lanes)
        self.form, self.columns = form, columns
        self.values, self.scale, self.offset = values, scale, offset

    def words(self, index: Any) -> list[Any]:
        """The words that hold `QUAD * quads` inputs of the columns: the index-th of them."""
        return [self.load(address, self.integers) for address in self._row(self.values, index, QUAD)]

    def prefetch(self, index: Any) -> None:
        """Asks for the values AHEAD bytes past the words of `index`, where the weight may have ended."""
        start = self.at(self.values, index, TILE * QUAD)
        for line in range(0, TILE * QUAD, 64):
            address = self.builder.add(start, word(AHEAD + line))
            pointer = self.builder.inttoptr(address, BYTE.as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [pointer.type] + [INTEGER] * 3)
            function = get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
            # To be read, where to, data.
            self.builder.call(function, [pointer, *(ir.Constant(INTEGER, i) for i in (0, _SECOND_CACHE, 1))])

    def factors(self, block: Any) -> tuple[list[Any], list[Any]]:
        """The scales and the offsets of a block; no offsets where the form has none."""
        return self._floats(self.scale, self.form.scale, block), self._floats(
            self.offset, self.form.offset, block
        )

    def _floats(self, base: Any, kind: str | None, block: Any) -> list[Any]:
        if kind is None:
            return []
        return [self.floats_at(address, _KINDS[kind]) for address in self._row(base, block, bytes_of(kind))]

    def _row(self, base: Any, index: Any, size: int) -> list[Any]:
        """Addresses of the columns in a row of TILE elements of so many bytes."""
        start = self.at(base, index, TILE * size)
        return [self.at(start, column * self.lanes, size) for column in self.columns]
