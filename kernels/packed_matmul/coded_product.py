"""Products with weights in codes, for any number of rows."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxspec_kernels.fp8_matmul import fp8_matmul, has_output_scales, reads, runs_here
from jaxspec_kernels.matmul import matmul
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.packed_matmul import (
    HOPPER_ROWS,
    CodedWeight,
    dequantize_codes,
    gate,
    gated_packed_matmul,
    is_for_hopper,
    packed_matmul,
)

FEW_ROWS = 256
"""Up to so many rows are multiplied with the codes; more with the dequantized weight.

`packed_matmul` dequantizes a weight again for every tile of rows. Without its kernel for many rows on the
Hopper generation, 512 rows on an H100 took longer than dequantizing the weight once and multiplying it by
cuBLAS, for all four products of Llama-3-8B but one.
"""
FEW_FP8_ROWS = 32
"""The same for weights that `fp8_matmul` multiplies: tensor cores have time for so few rows in bfloat16."""
SPLIT_ROWS = 1024
"""Up to so many rows are split in two for `fp8_matmul`, which is faster than dequantizing the weight."""


def coded_product(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x @ kernel; arguments and result are those of `packed_matmul`.

    Few rows are multiplied with the codes. More are multiplied in FP8 where the weight and the GPU allow it:
    rounded if the kernel's `activations` say so, otherwise split in two numbers. Elsewhere the weight is that
    of a bfloat16 network without codes, whose values are rounded to bfloat16; on the Hopper generation
    `packed_matmul` dequantizes it, for all but the longest prompts. Inside `exact`, all numbers of rows are
    multiplied with the codes, so that a row has the same bits.
    """
    if _reads_codes(x, kernel):
        return packed_matmul(x, kernel, out_dtype=out_dtype)
    is_rounded = _rounds(kernel)
    if is_rounded or (_splits(kernel) and math.prod(x.shape[:-1]) <= SPLIT_ROWS):
        return fp8_matmul(x, kernel, terms=1 if is_rounded else 2, out_dtype=out_dtype)
    return matmul(x, dequantize_codes(x, kernel), out_dtype=out_dtype)


def gated_coded_product(x: jax.Array, gate_up: CodedWeight) -> jax.Array:
    """SiLU of gates times ups, as `coded_product` gives them; see `gated_packed_matmul`."""
    return gated_packed_matmul(x, gate_up) if _reads_codes(x, gate_up) else gate(coded_product(x, gate_up))


def is_gated_in_fp8(x: jax.Array, gate_up: object, down: object) -> bool:
    """Whether `gated_fp8_matmul` multiplies x by both weights as `coded_product` would."""
    rows = math.prod(x.shape[:-1])
    if is_exact() or rows <= FEW_FP8_ROWS or x.dtype != jnp.bfloat16:
        return False
    weights = gate_up, down
    return all(
        isinstance(each, CodedWeight) and _rounds(each) and has_output_scales(each) for each in weights
    )


def _reads_codes(x: jax.Array, kernel: CodedWeight) -> bool:
    """Whether rows are multiplied with the codes."""
    few = HOPPER_ROWS if is_for_hopper(kernel) else FEW_ROWS
    few = FEW_FP8_ROWS if _rounds(kernel) or _splits(kernel) else few
    return is_exact() or math.prod(x.shape[:-1]) <= few or x.dtype != jnp.bfloat16


def _splits(kernel: CodedWeight) -> bool:
    """Whether some rows are split in two for FP8 for this weight, unless it `_rounds` them."""
    return reads(kernel) and has_output_scales(kernel) and runs_here()


def _rounds(kernel: CodedWeight) -> bool:
    """Whether many rows are rounded to FP8 for this weight."""
    return kernel.activations == "float8_e4m3fn" and reads(kernel)
