"""Products of a few rows on a CPU, at the speed that the memory delivers the weight.

XLA's products of two rows and more pack the weight first, which costs more than reading it. Chains of
products with 300 MB of float32 weights, two cores: XLA 10 to 18 ms for one row and 31 to 56 for five, this
kernel 11 to 13 and 12 to 18. It reads the weight once, in tiles of columns whose sums stay in the
first-level cache. A row's sums are taken in the same order whatever the number of rows, so a row verified
among drafts equals the same row decoded alone bit for bit.

A packed weight is widened to float32 in registers and summed in that order too: the result is that of the
dense weight bit for bit, out of fewer bytes.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.matmul import MIN_WEIGHT_BYTES, reference
from jaxspec_kernels.matmul.packed_weight import BLOCK, PackedWeight
from llvmlite import ir
from numba import carray, types
from numba.core.extending import intrinsic

GROUP = 8
"""Rows whose sums are taken side by side."""
TILE = 512
UNROLL = 8


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """See `jaxspec_kernels.matmul.reference`, which computes what this kernel is not for."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if not (
        rows > 0
        # XLA would expand a packed weight every time: for 64 rows that takes three times as long.
        and (rows <= GROUP or isinstance(kernel, PackedWeight))
        and x.dtype == kernel.dtype == jnp.float32
        and out_dtype in (None, jnp.float32)
        and kernel.size * 4 >= MIN_WEIGHT_BYTES
    ):
        return reference(x, kernel, out_dtype=out_dtype)
    outs = kernel.shape[1:]
    outputs = math.prod(outs)
    if isinstance(kernel, PackedWeight):
        form, weight = kernel.form, (kernel.values, kernel.scale, kernel.offset)
    else:
        form, weight = "float32", (kernel.reshape(width, outputs),)
    weight = tuple(array for array in weight if array is not None)

    def run(x: jax.Array, group: int) -> jax.Array:
        y = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
        return jax.ffi.ffi_call(_target(form, group), y)(x, *weight)

    x2 = x.reshape(rows, width)
    whole = rows // GROUP * GROUP
    parts = [run(x2[:whole], GROUP)] if whole else []
    if whole < rows:
        parts.append(run(x2[whole:], rows - whole))
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return y.reshape(*x.shape[:-1], *outs)


@cache
def _target(form: str, group: int) -> str:
    """Compiles and registers the kernel for a form of weight and groups of so many rows; returns its name."""
    name = f"jaxspec_matmul_{form}_{group}"
    scope = {"__name__": __name__, "np": np, "carray": carray, "call": call}
    scope |= {"address": call.address_of(name), "widen": _widen}
    scope |= {"lower": _four_bits(upper=False), "upper": _four_bits(upper=True)}
    # A template of ours: no text from outside enters it. Under this file's name Numba keeps what it
    # compiled, and throws it away when this file changes.
    exec(compile(_source(_FORMS[form], group, name), __file__, "exec"), scope)
    call.register(name, scope[f"{name}_part"], scope[f"{name}_handler"], fastmath={"contract"})
    return name


@intrinsic
def _widen(typing_context, bits):
    """The float32 of a bfloat16's bits."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        shifted = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(types.uint16), generate


def _four_bits(upper: bool) -> Any:
    """A function of Numba's: the float32 of the upper or the lower four bits of a byte."""

    @intrinsic
    def four_bits(typing_context, byte):
        def generate(context, builder, signature, arguments):
            word = ir.IntType(32)
            wide = builder.zext(arguments[0], word)
            part = builder.lshr if upper else builder.and_
            return builder.sitofp(part(wide, ir.Constant(word, 4 if upper else 15)), ir.FloatType())

        return types.float32(types.uint8), generate

    return four_bits


@dataclass(frozen=True)
class _Form:
    """How a weight is stored, and read.

    Attributes:
      pointer: the function of `numba_call` that points to the values.
      value: the weight of input k + i as float32, out of v{row}, the row of values that holds it.
      blocks: arrays of one number per block of inputs, as `value` names them.
      inputs_per_row: inputs that one row of values holds.
    """

    pointer: str
    value: str
    blocks: tuple[str, ...] = ()
    inputs_per_row: int = 1

    def weight(self, i: int) -> str:
        row, part = divmod(i, self.inputs_per_row)
        return self.value.format(row=row, part=("lower", "upper")[part])


_FORMS = {
    "float32": _Form("floats", "v{row}[j]"),
    "bfloat16": _Form("halves", "widen(v{row}[j])"),
    "int8": _Form("signed_bytes", "scale_j * np.float32(v{row}[j])", ("scale",)),
    "uint8": _Form(
        "unsigned_bytes", "scale_j * {part}(v{row}[j]) + offset_j", ("scale", "offset"), inputs_per_row=2
    ),
}


def _source(form: _Form, group: int, name: str) -> str:
    """The kernel, its loops over a group's rows and over UNROLL weight rows written out.

    LLVM vectorises the loops over columns only if the rows' sums are arrays of their own and the weight's
    rows are slices: with loops in their place it took five times as long.
    """
    g, per_row = range(group), form.inputs_per_row

    def each(template: str) -> str:
        return "; ".join(template.format(m=m) for m in g)

    def add(inputs: int) -> list[str]:
        """Adds the products of inputs k, k + 1, … to the sums of a tile."""
        return [
            *(
                f"                v{i} = w[k // {per_row} + {i}, left:right]"
                for i in range(-(-inputs // per_row))
            ),
            *(f"                {block}_k = {block}[k // {BLOCK}, left:right]" for block in form.blocks),
            *(f"                x{m}_{i} = x{m}[k + {i}]" for m in g for i in range(inputs)),
            "                for j in range(right - left):",
            *(f"                    {block}_j = {block}_k[j]" for block in form.blocks),
            *(f"                    w{i} = {form.weight(i)}" for i in range(inputs)),
            *(
                f"                    a{m}[j] += {' + '.join(f'x{m}_{i} * w{i}' for i in range(inputs))}"
                for m in g
            ),
        ]

    lines = [
        f"def {name}_part(frame, part, parts):",
        "    x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)",
        "    rows, width = call.shape(x_, 2)[0], call.shape(x_, 2)[1]",
        "    outputs = call.shape(y_, 2)[1]",
        "    x, y = carray(call.floats(x_), (rows, width)), carray(call.floats(y_), (rows, outputs))",
        f"    w = carray(call.{form.pointer}(w_), (width // {per_row}, outputs))",
        *(
            f"    {block} = carray(call.floats(call.argument(frame, {i})), (width // {BLOCK}, outputs))"
            for i, block in enumerate(form.blocks, 2)
        ),
        "    start = outputs * part // parts // 16 * 16",
        "    stop = outputs if part == parts - 1 else outputs * (part + 1) // parts // 16 * 16",
        f"    {each(f'a{{m}} = np.empty({TILE}, np.float32)')}",
        f"    for left in range(start, stop, {TILE}):",
        f"        right = min(left + {TILE}, stop)",
        # A tile of the weight stays in the second-level cache from one group of rows to the next.
        f"        for top in range(0, rows, {group}):",
        f"            {each('x{m} = x[top + {m}]')}",
        f"            for j in range(right - left): {each('a{m}[j] = np.float32(0)')}",
        f"            for k in range(0, width - {UNROLL - 1}, {UNROLL}):",
        *add(UNROLL),
        # Blocks are whole multiples of UNROLL: no input of theirs is left over.
        *(() if form.blocks else (f"            for k in range(width - width % {UNROLL}, width):", *add(1))),
        *(f"            y[top + {m}, left:right] = a{m}[: right - left]" for m in g),
        "    return 0",
        f"def {name}_handler(frame): return call.handle(frame, address())",
    ]
    return "\n".join(lines)
