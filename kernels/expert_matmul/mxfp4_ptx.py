"""PTX that dequantizes MXFP4 in registers."""

EXPAND = """{
.reg .b32 a, s;
mov.b32 s, 0x80008000;
shl.b32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
shl.b32 $0, $4, 12;
lop3.b32 a, $0, s, a, 0xEA;
fma.rn.bf16x2 $0, a, $5, s;
shl.b32 a, $4, 2;
and.b32 a, a, 0x01C001C0;
shl.b32 $1, $4, 8;
lop3.b32 a, $1, s, a, 0xEA;
fma.rn.bf16x2 $1, a, $5, s;
shr.b32 a, $4, 2;
and.b32 a, a, 0x01C001C0;
shl.b32 $2, $4, 4;
lop3.b32 a, $2, s, a, 0xEA;
fma.rn.bf16x2 $2, a, $5, s;
shr.b32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 a, $4, s, a, 0xEA;
fma.rn.bf16x2 $3, a, $5, s;
}"""
"""Outputs bf16x2 $0 to $3, the weights of the four-bit codes 0 to 3 in two words; inputs u16x2 $4, the words,
and bf16x2 $5, their factors.

The sign bit of a code becomes a bfloat16's sign. Its other three bits become bits 8 to 6: the two lowest of
the exponent and the highest of the mantissa. This bfloat16 is 2**-126 times the code's value, also for the
subnormal code, and the factor, 2**(scale - 127 + 126), compensates. Adding -0 (s) keeps a product's sign.
"""
FACTOR_BIAS = 126
"""The stored exponent of a bfloat16 factor minus the scale."""
