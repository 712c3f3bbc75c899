"""Products of one to eight rows on a CPU that read each weight once.

The weight is read in tiles of columns, whose sums stay in the first-level cache. A row's sums have the same
order for any number of rows, so a row that is verified among drafts equals the same row decoded alone, bit
for bit. XLA's products do not guarantee this; they are about as fast where memory bandwidth is the limit.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.matmul import MIN_WEIGHT_BYTES, reference
from jaxspec_kernels.matmul.numba_int8 import int8_matmul
from jaxspec_kernels.matmul.numba_packed import packed_matmul
from jaxspec_kernels.matmul.packed_weight import PackedWeight
from numba import carray

MAX_ROWS = 8
TILE = 512
UNROLL = 8


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """See `jaxspec_kernels.matmul.reference`, which is called for cases that the kernels do not support."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if not (
        rows > 0
        # XLA would expand a packed weight in every call, which for 64 rows takes three times as long.
        and (isinstance(kernel, PackedWeight) or (rows <= MAX_ROWS and kernel.size * 4 >= MIN_WEIGHT_BYTES))
        and x.dtype == kernel.dtype == jnp.float32
        and out_dtype in (None, jnp.float32)
    ):
        return reference(x, kernel, out_dtype=out_dtype)
    if isinstance(kernel, PackedWeight):
        packed = int8_matmul if kernel.activations == "int8" else packed_matmul
        return packed(x.reshape(rows, width), kernel).reshape(*x.shape[:-1], *kernel.shape[1:])
    outputs = kernel.size // width
    y = jax.ffi.ffi_call(_target(rows), jax.ShapeDtypeStruct((rows, outputs), jnp.float32))(
        x.reshape(rows, width), kernel.reshape(width, outputs)
    )
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


@call.once
def _target(rows: int) -> str:
    """Compiles and registers the kernel for `rows` rows; returns its name."""
    name = f"jaxspec_matmul_float32_{rows}"
    scope: dict[str, Any] = {"__name__": __name__, "np": np, "carray": carray, "call": call}
    scope["address"] = call.address_of(name)
    call.define(_source(rows, name), __file__, scope)
    call.register(name, scope[f"{name}_part"], scope[f"{name}_handler"], fastmath={"contract"})
    return name


def _source(rows: int, name: str) -> str:
    """The source of the kernel, with the loops over rows and over UNROLL weight rows unrolled.

    LLVM vectorises the loops over columns only if each row's sums are a separate array and the weight's rows
    are slices. With loops instead, the kernel took five times as long.
    """
    r, u = range(rows), range(UNROLL)

    def each(template: str) -> str:
        return "; ".join(template.format(m=m) for m in r)

    # A chain of additions, in the same order as the kernel for packed weights.
    term = "x{m}_{u} * w{u}[j]"
    lines = [
        f"def {name}_part(frame, part, parts):",
        "    x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)",
        "    width, outputs = call.shape(w_, 2)[0], call.shape(w_, 2)[1]",
        f"    x, w = carray(call.floats(x_), ({rows}, width)), carray(call.floats(w_), (width, outputs))",
        f"    y = carray(call.floats(y_), ({rows}, outputs))",
        "    start = outputs * part // parts // 16 * 16",
        "    stop = outputs if part == parts - 1 else outputs * (part + 1) // parts // 16 * 16",
        f"    {each(f'a{{m}} = np.empty({TILE}, np.float32)')}",
        f"    for left in range(start, stop, {TILE}):",
        f"        size = min({TILE}, stop - left)",
        f"        for j in range(size): {each('a{m}[j] = np.float32(0)')}",
        f"        for k in range(0, width - {UNROLL - 1}, {UNROLL}):",
        *(f"            w{i} = w[k + {i}, left:left + size]" for i in u),
        *(f"            x{m}_{i} = x[{m}, k + {i}]" for m in r for i in u),
        "            for j in range(size):",
        *(f"                a{m}[j] = a{m}[j] + {' + '.join(term.format(m=m, u=i) for i in u)}" for m in r),
        f"        for k in range(width - width % {UNROLL}, width):",
        "            w0 = w[k, left:left + size]",
        *(f"            x{m}_0 = x[{m}, k]" for m in r),
        "            for j in range(size):",
        *(f"                a{m}[j] += {term.format(m=m, u=0)}" for m in r),
        *(f"        y[{m}, left:left + size] = a{m}[:size]" for m in r),
        "    return 0",
        f"def {name}_handler(frame): return call.handle(frame, address())",
    ]
    return "\n".join(lines)
