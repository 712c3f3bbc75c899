"""Sizes for the tests and the benchmarks of `packed_matmul`, `dequantize_codes` and `fp8_matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """[rows, width] times [width, outputs], in codes of `bits`; `scale_rows` x `group` of them share a scale.

    A group of 0 is the whole width. Codes of eight bits are FP8, or int8.
    """

    name: str
    rows: int
    width: int
    outputs: int
    bits: int
    group: int
    scale_rows: int = 1
    has_zero: bool = False
    dtype: str = "bfloat16"
    is_int8: bool = False


_FORMATS: tuple[tuple[str, int, int, int, bool], ...] = (
    ("FP8, blocks", 8, 128, 128, False),
    ("FP8, channels", 8, 0, 1, False),
    ("INT4, 128", 4, 128, 1, False),
    ("INT4, 128, zero points", 4, 128, 1, True),
)
CASES = (
    Case("FP8, half a block", 3, 192, 96, 8, 64, 32),
    Case("FP8, one row", 1, 256, 130, 8, 128),
    Case("INT4, groups of 64", 5, 512, 160, 4, 64, has_zero=True),
    Case("INT4, groups of 32", 17, 384, 160, 4, 32, has_zero=True),
    Case("INT4, groups of 32, no zero points", 2, 256, 64, 4, 32),
    Case("INT4, half a block", 33, 384, 72, 4, 128),
    Case("INT4, channels", 4, 512, 72, 4, 0),
    Case("INT8, groups of 32", 19, 320, 160, 8, 32, is_int8=True),
    Case("INT8, groups of 16", 5, 288, 96, 8, 16, is_int8=True),
    Case("INT8, half a block", 2, 192, 72, 8, 64, is_int8=True),
    Case("INT8, groups of 128", 17, 384, 64, 8, 128, is_int8=True),
    Case("INT8, channels", 3, 288, 130, 8, 0, is_int8=True),
    Case("INT4, 100 rows", 100, 1024, 448, 4, 128),
    Case("INT4, groups of 64, 130 rows", 130, 1024, 384, 4, 64, has_zero=True),
    Case("INT4, groups of 256, 90 rows", 90, 1024, 192, 4, 256, has_zero=True),
    Case("FP8, blocks, 100 rows", 100, 1024, 384, 8, 128, 128),
    Case("FP8, channels, 70 rows", 70, 256, 130, 8, 0),
    Case("INT8, channels, 80 rows", 80, 512, 128, 8, 0, is_int8=True),
    Case("INT4, zero points, 300 rows", 300, 1024, 448, 4, 128, has_zero=True),
    Case("INT4, groups of 64, 257 rows", 257, 2048, 192, 4, 64),
    Case("INT4, channels, 140 rows", 140, 512, 192, 4, 0),
    Case("FP8, blocks, 520 rows", 520, 1024, 384, 8, 128, 128),
    Case("INT8, groups of 128, 200 rows", 200, 2048, 320, 8, 128, is_int8=True),
    Case("INT4, whole and split tiles", 300, 1024, 11264, 4, 128, has_zero=True),
    *(
        Case(f"{name}, odd sizes", 7, 1024, 384, bits, group, scale_rows, has_zero)
        for name, bits, group, scale_rows, has_zero in _FORMATS
    ),
    *(
        Case(f"8B {shape}, {rows} rows, INT8, {group}", rows, width, outputs, 8, group, is_int8=True)
        for rows in (4, 128)
        for shape, width, outputs in (("gate and up", 4096, 28672), ("down", 14336, 4096))
        for group in (32, 16)
    ),
    *(
        Case(f"8B {shape}, {rows} rows, {name}", rows, width, outputs, bits, group, scale_rows, has_zero)
        for rows in (4, 12, 32, 128)
        for shape, width, outputs in (("gate and up", 4096, 28672), ("down", 14336, 4096))
        for name, bits, group, scale_rows, has_zero in _FORMATS
    ),
)
FP8 = (
    Case("one row", 1, 256, 130, 8, 128),
    Case("blocks, odd sizes", 33, 1024, 384, 8, 128, 128),
    Case("channels, odd sizes", 150, 1024, 384, 8, 0),
    Case("tensor", 17, 256, 128, 8, 0, 128),
    *(
        Case(f"8B {shape}, 2048 rows, {name}", 2048, width, outputs, bits, group, scale_rows)
        for shape, width, outputs in (("gate and up", 4096, 28672), ("down", 14336, 4096))
        for name, bits, group, scale_rows, _ in _FORMATS[:2]
    ),
)
"""Of `fp8_matmul`."""
GATED_CODES = (
    Case("INT4, 5 rows", 5, 512, 256, 4, 128, has_zero=True),
    Case("INT4, 100 rows", 100, 512, 640, 4, 128),
    Case("INT4, 130 rows, half a tile", 130, 512, 192, 4, 128),
    Case("INT4, groups of 64, zero points, 150 rows", 150, 1024, 256, 4, 64, has_zero=True),
    Case("FP8, blocks, 150 rows", 150, 1024, 768, 8, 128, 128),
    Case("INT4, zero points, 300 rows", 300, 1024, 896, 4, 128, has_zero=True),
    Case("INT4, channels, 140 rows", 140, 512, 384, 4, 0),
    Case("FP8, blocks, 520 rows", 520, 1024, 768, 8, 128, 128),
    Case("FP8, channels, 200 rows", 200, 512, 384, 8, 0),
    Case("INT8, groups of 128, 260 rows", 260, 2048, 640, 8, 128, is_int8=True),
    Case("INT4, whole and split tiles", 300, 1024, 11264, 4, 128, has_zero=True),
    Case("INT4, whole sums, 3 rows", 3, 512, 16400, 4, 128),
    Case("INT4, zero points, whole sums, 64 rows", 64, 512, 16640, 4, 32, has_zero=True),
    Case("INT8, whole sums, 12 rows", 12, 512, 16640, 8, 64, is_int8=True),
    Case("FP8, blocks, whole sums, 7 rows", 7, 1024, 16640, 8, 128, 128),
    Case("FP8, channels, whole sums, 30 rows", 30, 512, 33024, 8, 0),
    *(
        Case(f"8B, {rows} rows, {name}", rows, 4096, 28672, bits, group, scale_rows, has_zero)
        for rows in (4, 32, 512, 2048)
        for name, bits, group, scale_rows, has_zero in (_FORMATS[0], _FORMATS[3])
    ),
)
"""Of `gated_packed_matmul`; outputs are those of gate and up."""


@dataclass(frozen=True)
class Gated:
    """[rows, width] through gate and up, [width, 2, inner], and down, [inner, width], in FP8."""

    name: str
    rows: int
    width: int
    inner: int
    dtype: str = "bfloat16"


GATED = (
    Gated("odd sizes", 35, 256, 640),
    Gated("one row", 1, 128, 128),
    Gated("8B, 128 rows", 128, 4096, 14336),
    Gated("8B, 2048 rows", 2048, 4096, 14336),
    Gated("70B, 128 rows", 128, 8192, 28672),
)
"""Of `gated_fp8_matmul`."""
