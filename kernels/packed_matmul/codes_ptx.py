"""PTX that dequantizes codes of four or eight bits in registers to bfloat16, exactly."""


def _fp8(code: int, words: str, result: str) -> list[str]:
    """The sign bit of a code becomes a bfloat16's sign, and its other bits become bits 10 to 4: the four
    lowest of the exponent and the three highest of the mantissa. This bfloat16 is 2**-120 times the code's
    value, even of subnormal codes, and the factor f compensates. Adding -0 (s) keeps a product's sign.
    """
    return [
        "mov.b32 s, 0x80008000;",
        "mov.b32 m, 0x07F007F0;",
        "mov.b32 f, 0x7B807B80;",
        f"mov.b32 b, {words};" if code else f"shl.b32 b, {words}, 8;",
        f"shr.b32 a, {words}, 4;" if code else f"shl.b32 a, {words}, 4;",
        "and.b32 a, a, m;",
        "lop3.b32 a, b, s, a, 0xEA;",
        f"fma.rn.bf16x2 {result}, a, f, s;",
    ]


def _int8(code: int, words: str, result: str) -> list[str]:
    """The seven lowest bits of a code in the mantissa of the bfloat16 128 (h) are 128 plus these bits. Its
    sign bit in the place of the exponent's lowest is 128 or 256, which is subtracted.
    """
    return [
        "mov.b32 q, 0x007F007F;",
        "mov.b32 s, 0x00800080;",
        "mov.b32 h, 0x43004300;",
        "mov.b32 f, 0xBF80BF80;",
        f"shr.b32 b, {words}, 8;" if code else f"mov.b32 b, {words};",
        "lop3.b32 a, b, q, h, 0xEA;",
        "lop3.b32 b, b, s, h, 0xEA;",
        f"fma.rn.bf16x2 {result}, b, f, a;",
    ]


def _int4(code: int, words: str, result: str, offset: str) -> list[str]:
    """A code in the lowest bits of the bfloat16 128 (h) is 128 plus the code."""
    return [
        "mov.b32 q, 0x000F000F;",
        "mov.b32 h, 0x43004300;",
        "mov.b32 f, 0x3F803F80;",
        "mov.b32 c, 0xC308C308;",
        f"shr.b32 a, {words}, {4 * code};" if code else f"mov.b32 a, {words};",
        "lop3.b32 a, a, q, h, 0xEA;",
        f"fma.rn.bf16x2 {result}, a, f, {offset};",
    ]


def _block(*parts: list[str]) -> str:
    lines = [line for part in parts for line in part]
    return "\n".join(["{", ".reg .b32 a, b, c, f, h, m, q, s;", *lines, "}"])


def one_code(per_word: int, code: int, *, is_int8: bool, is_scaled: bool) -> str:
    """Outputs bf16x2 $0, a code of two words; inputs u16x2 $1, the words, and bf16x2 $2 to $4.

    A code of four bits is added to the offset $2: -128 less a zero point. If `is_scaled`, the result is
    multiplied by a scale, which is $3 + $4, and rounded: the rounding of $4's product hardly ever matters.
    """
    of_eight_bits = _int8 if is_int8 else _fp8
    dequantize = _int4(code, "$1", "a", "$2") if per_word == 4 else of_eight_bits(code, "$1", "a")
    scale = ["mul.rn.bf16x2 b, a, $4;", "fma.rn.bf16x2 $0, a, $3, b;"]
    return _block(dequantize, scale if is_scaled else ["mov.b32 $0, a;"])


FP8 = _block(_fp8(0, "$2", "$0"), _fp8(1, "$2", "$1"))
"""Outputs bf16x2 $0 and $1, the codes 0 and 1 of two words; input u16x2 $2, the words."""
INT8 = _block(_int8(0, "$2", "$0"), _int8(1, "$2", "$1"))
"""As `FP8`."""


def _four(*offsets: str) -> str:
    """Outputs bf16x2 $0 to $3, the codes 0 to 3 of two words, plus the offsets; input u16x2 $4, the words."""
    return _block(*(_int4(code, "$4", f"${code}", offset) for code, offset in enumerate(offsets)))


INT4 = _four("c", "c", "c", "c")
"""Codes less 8: the offset c is -136."""
INT4_OFFSETS = _four("$5", "$5", "$6", "$6")
"""Codes plus offsets, bf16x2 $5 for the codes 0 and 1 and $6 for the others: -128 less their zero points."""
INT4_EACH_OFFSET = _four("$5", "$6", "$7", "$8")
"""Codes plus an offset of each."""
