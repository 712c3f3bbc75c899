"""Generates LLVM code for vectors, because LLVM does not reliably vectorise Numba's loops."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

BYTE, HALF_WORD, INTEGER, WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()

_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453
# Added to a float32 of magnitude below 2**22, this leaves the rounded integer in the lowest bits.
ROUND, ROUND_BITS = 12582912.0, 0x4B400000
# exp(x) for |x| <= ln(2) / 2; the next term is under 6e-9.
_EXP = [1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0]
_SQRT_HALF_BITS = 0x3F3504F3
# log(1 + x) = x - x ** 2 / 2 + x ** 3 * p(x); p is fitted over 1 + x from sqrt(1/2) to sqrt(2).
_LOG = [
    *(-0.07362868, 0.12620327, -0.13202104, 0.14227115),
    *(-0.16621371, 0.19999826, -0.25000852, 0.33333355),
]


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

    def prefetch(self, address: Any, *, into: int) -> None:
        """Asks for the cache line at an address, which may be invalid, to be brought `into` cache 1 or 2."""
        pointer = self._pointer(address, BYTE)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type] + [INTEGER] * 3)
        function = get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        # A read, the locality (3 for the nearest cache), of data.
        self.builder.call(function, [pointer, *(ir.Constant(INTEGER, i) for i in (0, 4 - into, 1))])

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

    def constant(self, value: int | float) -> ir.Constant:
        """A vector with the same integer or the same float in every lane."""
        kind = self.floats if isinstance(value, float) else self.integers
        return ir.Constant(kind, [value] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c of float vectors, with one rounding."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def sums_of(self, vectors: Sequence[Any]) -> Any:
        """A float vector with the sum of each of as many vectors as it has lanes."""
        rows = list(vectors)
        while len(rows) > 1:
            rows = [self._pair_sums(*rows[i : i + 2]) for i in range(0, len(rows), 2)]
        return rows[0]

    def _pair_sums(self, x: Any, y: Any) -> Any:
        """The sums of adjacent lanes of x, then those of y."""
        even, odd = (ir.Constant(self.integers, list(range(first, 2 * self.lanes, 2))) for first in range(2))
        build = self.builder
        return build.fadd(build.shuffle_vector(x, y, even), build.shuffle_vector(x, y, odd))

    def folded(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """The lanes of a vector joined by a function of two values, which halves the vector each time."""
        build, lanes = self.builder, self.lanes
        while lanes > 1:
            lanes //= 2
            halves = (list(range(first, first + lanes)) for first in (0, lanes))
            kind = ir.VectorType(INTEGER, lanes)
            vector = join(*(build.shuffle_vector(vector, vector, ir.Constant(kind, half)) for half in halves))
        return build.extract_element(vector, ir.Constant(INTEGER, 0))

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of two floats, lane by lane; y where one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def exp(self, x: Any) -> Any:
        """The exponential of floats of at most 0, to 1e-7 of itself, but at least 2 ** -126."""
        build, constant = self.builder, self.constant
        power = build.fmul(x, constant(_LOG2_E))
        power = build.select(build.fcmp_ordered("<", power, constant(-126.0)), constant(-126.0), power)
        shifted = build.fadd(power, constant(ROUND))
        rest = build.fsub(power, build.fsub(shifted, constant(ROUND)))
        rest = build.fmul(rest, constant(_LN_2))
        value = constant(_EXP[0])
        for coefficient in _EXP[1:]:
            value = self.fma(value, rest, constant(coefficient))
        bits = build.sub(build.bitcast(shifted, self.integers), constant(ROUND_BITS - 127))
        return build.fmul(value, build.bitcast(build.shl(bits, constant(23)), self.floats))

    def log(self, x: Any) -> Any:
        """The natural logarithm of positive floats that are not subnormal, to 1e-7 of itself."""
        build, constant = self.builder, self.constant
        # x = m * 2 ** e with m from sqrt(1/2) to sqrt(2).
        bits = build.bitcast(x, self.integers)
        exponent = build.ashr(build.sub(bits, constant(_SQRT_HALF_BITS)), constant(23))
        mantissa = build.bitcast(build.sub(bits, build.shl(exponent, constant(23))), self.floats)
        rest = build.fsub(mantissa, constant(1.0))
        value = constant(_LOG[0])
        for coefficient in _LOG[1:]:
            value = self.fma(value, rest, constant(coefficient))
        square = build.fmul(rest, rest)
        value = self.fma(build.fmul(value, rest), square, build.fmul(square, constant(-0.5)))
        return self.fma(build.sitofp(exponent, self.floats), constant(_LN_2), build.fadd(rest, value))

    def call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Calls an intrinsic of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(get_or_insert_function(self.builder.module, kind, name), arguments)


def word(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(WORD, value)
