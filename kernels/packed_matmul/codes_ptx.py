"""PTX that expands codes of four or eight bits in registers to bfloat16, exactly."""

FP8 = """{
.reg .b32 a, s, m, f;
mov.b32 s, 0x80008000;
mov.b32 m, 0x07F007F0;
mov.b32 f, 0x7B807B80;
shl.b32 $0, $2, 8;
shl.b32 a, $2, 4;
and.b32 a, a, m;
lop3.b32 $0, $0, s, a, 0xEA;
fma.rn.bf16x2 $0, $0, f, s;
shr.b32 a, $2, 4;
and.b32 a, a, m;
lop3.b32 $1, $2, s, a, 0xEA;
fma.rn.bf16x2 $1, $1, f, s;
}"""
"""Outputs bf16x2 $0 and $1, the codes 0 and 1 of two words; input u16x2 $2, the words.

The sign bit of a code becomes a bfloat16's sign, and its other seven bits become bits 10 to 4: the four
lowest bits of the exponent and the three highest of the mantissa. This bfloat16 is 2**-120 times the code's
value, even of subnormal codes, and the factor f compensates. Adding -0 (s) keeps a product's sign.
"""

INT8 = """{
.reg .b32 a, b, q, s, h, f;
mov.b32 q, 0x007F007F;
mov.b32 s, 0x00800080;
mov.b32 h, 0x43004300;
mov.b32 f, 0xBF80BF80;
lop3.b32 a, $2, q, h, 0xEA;
lop3.b32 b, $2, s, h, 0xEA;
fma.rn.bf16x2 $0, b, f, a;
shr.b32 b, $2, 8;
lop3.b32 a, b, q, h, 0xEA;
lop3.b32 b, b, s, h, 0xEA;
fma.rn.bf16x2 $1, b, f, a;
}"""
"""Outputs bf16x2 $0 and $1, the codes 0 and 1 of two words; input u16x2 $2, the words.

The seven lowest bits of a code in the mantissa of the bfloat16 128 (h) are 128 plus these bits. Its sign bit
in the place of the exponent's lowest is 128 or 256, which is subtracted.
"""


def _int4(offsets: tuple[str, str, str, str]) -> str:
    """Outputs bf16x2 $0 to $3, the codes 0 to 3 of two words, plus the offsets; input u16x2 $4, the words.

    A code in the lowest bits of the bfloat16 128 (h) is 128 plus the code.
    """
    lines = []
    for code, offset in enumerate(offsets):
        shifted = f"shr.b32 a, $4, {4 * code};" if code else "mov.b32 a, $4;"
        lines += [shifted, "lop3.b32 a, a, q, h, 0xEA;", f"fma.rn.bf16x2 ${code}, a, f, {offset};"]
    return "\n".join(
        [
            "{",
            ".reg .b32 a, q, h, f, c;",
            "mov.b32 q, 0x000F000F;",
            "mov.b32 h, 0x43004300;",
            "mov.b32 f, 0x3F803F80;",
            "mov.b32 c, 0xC308C308;",
            *lines,
            "}",
        ]
    )


INT4 = _int4(("c", "c", "c", "c"))
"""Codes less 8: the offset c is -136."""
INT4_OFFSETS = _int4(("$5", "$5", "$6", "$6"))
"""Codes plus offsets, bf16x2 $5 for the codes 0 and 1 and $6 for the others: -128 less their zero points."""
INT4_EACH_OFFSET = _int4(("$5", "$6", "$7", "$8"))
"""Codes plus an offset of each."""
