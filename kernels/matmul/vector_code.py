"""Generates LLVM code for vectors, because LLVM does not reliably vectorise Numba's loops."""

from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

BYTE, HALF_WORD, INTEGER, WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()


class VectorCode:
    """Operations on vectors of `lanes` lanes of 32 bits; addresses are 64-bit words."""

    def __init__(self, builder: Any, lanes: int):
        self.builder = builder
        self.floats, self.integers = ir.VectorType(FLOAT, lanes), ir.VectorType(INTEGER, lanes)
        self.lanes = lanes

    def at(self, base: Any, index: Any, size: int) -> Any:
        """The address of element `index` of an array of `size` bytes each."""
        index = word(index) if isinstance(index, int) else index
        return self.builder.add(base, self.builder.mul(index, word(size)))

    def load(self, address: Any, kind: ir.Type, *, align: int = 1) -> Any:
        """Loads a value of LLVM's type `kind`; `align` is the alignment in bytes."""
        return self.builder.load(self._pointer(address, kind), align=align)

    def store(self, value: Any, address: Any, *, align: int = 1) -> None:
        """Stores a value."""
        self.builder.store(value, self._pointer(address, value.type), align=align)

    def _pointer(self, address: Any, kind: ir.Type) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def floats_at(self, address: Any, kind: ir.Type) -> Any:
        """Loads a vector of `kind`, HALF or FLOAT, as float32."""
        vector = self.load(address, ir.VectorType(kind, self.lanes), align=2)
        return vector if kind is FLOAT else self.builder.fpext(vector, self.floats)

    def spread(self, value: Any) -> Any:
        """A vector with the same value in every lane."""
        kind = ir.VectorType(value.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INTEGER, 0))
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), self.constant(0))

    def constant(self, value: int) -> ir.Constant:
        """A vector with the same integer in every lane."""
        return ir.Constant(self.integers, [value] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c of float vectors, with one rounding."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Calls an intrinsic of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(get_or_insert_function(self.builder.module, kind, name), arguments)


def word(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(WORD, value)
