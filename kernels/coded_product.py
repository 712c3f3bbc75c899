"""Products with weights in codes, for any number of rows."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxspec_kernels.fp8_matmul import fp8_matmul, reads
from jaxspec_kernels.matmul import matmul
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.packed_matmul import CodedWeight, expand_codes, packed_matmul

FEW_ROWS = {8: 256, 4: 256}
"""By the bits of a code: up to so many rows are multiplied with the codes; more with the expanded weight.

`packed_matmul` expands a weight again for every tile of rows. On an H100, with 512 rows, it took longer than
expanding the weight once and multiplying it by cuBLAS, for all four products of Llama-3-8B but one.
"""
FEW_UNROUNDED_ROWS = 32
"""The same, where more rows are rounded to FP8: with so few, tensor cores have time for bfloat16 as well."""


def coded_product(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x @ kernel; arguments and result are those of `packed_matmul`.

    Many rows are multiplied with the weight that a bfloat16 network without codes would have, whose values
    are rounded to bfloat16, or are rounded to FP8 themselves if the kernel's `activations` say so. Inside
    `exact`, all numbers of rows are multiplied with the codes, so that a row has the same bits.
    """
    rows = math.prod(x.shape[:-1])
    is_rounded = kernel.activations == "float8_e4m3fn" and reads(kernel)
    few = FEW_UNROUNDED_ROWS if is_rounded else FEW_ROWS[kernel.bits]
    if is_exact() or rows <= few or x.dtype != jnp.bfloat16:
        return packed_matmul(x, kernel, out_dtype=out_dtype)
    if is_rounded:
        return fp8_matmul(x, kernel, out_dtype=out_dtype)
    return matmul(x, expand_codes(x, kernel), out_dtype=out_dtype)
