"""PTX that expands MXFP4 in registers."""

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
"""bf16x2 $0 … $3: the weights of four-bit codes 0 … 3 of two words u16x2 $4, whose factors are bf16x2 $5.

A code's sign goes to a bfloat16's sign and its other three bits to the two lowest of the exponent and the
highest of the mantissa, bits 8 … 6: then it is 2**-126 times what it means, the subnormal code, too. The
factor, 2**(scale - 127 + 126), makes up for it. To add -0 (s) leaves a product's sign alone.
"""
FACTOR_BIAS = 126
"""A factor's exponent, as a bfloat16 stores it, less the scale."""
