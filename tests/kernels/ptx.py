"""Running a block of the few PTX instructions that dequantize weights."""

import re

import ml_dtypes
import numpy as np


def run_ptx(text, inputs, count=4):
    """What a block writes to its first `count` operands, for arrays u32 of its inputs."""
    registers = dict(inputs)

    def read(name):
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    def multiply_add(a, b, c):
        lanes = [x.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b, c)]
        rounded = (lanes[0] * lanes[1] + lanes[2]).astype(ml_dtypes.bfloat16)
        return rounded.view(np.uint16).view(np.uint32)

    def lop3(a, b, c, table):
        bits = [(~a & ~b & ~c), (~a & ~b & c), (~a & b & ~c), (~a & b & c)]
        bits += [(a & ~b & ~c), (a & ~b & c), (a & b & ~c), (a & b & c)]
        return sum(bit for i, bit in enumerate(bits) if int(table) >> i & 1)

    run = {
        "mov.b32": lambda a: np.broadcast_to(a, size).copy(),
        "shl.b32": lambda a, b: a << b,
        "shr.b32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "lop3.b32": lop3,
        "fma.rn.bf16x2": multiply_add,
        "mul.rn.bf16x2": lambda a, b: multiply_add(a, b, np.full_like(a, 1 << 31 | 1 << 15)),
    }
    size = len(next(iter(inputs.values())))
    for line in re.findall(r"^([a-z].*);$", text, re.MULTILINE):
        name, operands = line.split(maxsplit=1)
        result, *others = operands.split(", ")
        registers[result] = np.asarray(run[name](*map(read, others)), np.uint32)
    return [registers[f"${i}"] for i in range(count)]
