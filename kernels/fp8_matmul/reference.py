"""Product of rows in FP8 with a weight in FP8, in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.narrow import narrow
from jaxspec_kernels.op import device
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.reference import packed_matmul

BLOCK = 128
"""Inputs of a block of the weight."""
LARGEST = 448
"""The largest number of float8_e4m3fn."""
SCALED_EXPONENT = 7
"""Of a row's largest number that a power of two scales."""
SMALLEST = 2.0**-100
"""Rows without a larger number are rounded to zero, because their scales would overflow."""


def fp8_matmul(
    x: jax.Array, kernel: CodedWeight, *, terms: int = 1, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """`packed_matmul` with x as `split_fp8` gives it: rounded to FP8, or with two terms all but as it is.

    Args:
      x: [..., M].
      kernel: [M, out axes]; one that `reads` is true for, and with two terms also `has_output_scales`.
      terms: numbers in FP8 that an x is the sum of.
      out_dtype: the dtype of the result; that of x by default.

    Returns:
      [..., out axes]; sums are float32.
    """
    values, scale = split_fp8(x, terms)
    rows = values.astype(jnp.float32).sum(0) * scale
    return packed_matmul(rows, kernel, out_dtype=out_dtype or x.dtype)


def split_fp8(x: jax.Array, terms: int) -> tuple[jax.Array, jax.Array]:
    """Rows of x [..., M] as sums of numbers in FP8, times a scale for each row.

    Each term is what the ones before it leave, rounded. The scale of two is a power of two: they are as exact
    as a bfloat16, but leave out what is below 2**-17 of a row's largest number. The scale of one makes that
    number `LARGEST`; a power of two, which rounds equal numbers alike in all rows, changed answers more.

    Returns:
      float8_e4m3fn[terms, ..., M] and scales f32[..., 1].
    """
    rows = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    if terms == 1:
        inverse, scale = LARGEST / largest, largest / LARGEST
    else:
        # That of the scale, with float32's bias of 127.
        exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - SCALED_EXPONENT
        inverse = lax.bitcast_convert_type((2 * 127 - exponent) << 23, jnp.float32)
        scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    rest = rows * jnp.where(largest > SMALLEST, inverse, 0)
    values = []
    for _ in range(terms):
        values.append(narrow(rest, jnp.float8_e4m3fn))
        rest -= values[-1].astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return jnp.stack(values), jnp.where(largest <= SMALLEST, 0, scale)


def reads(kernel: CodedWeight) -> bool:
    """Whether the kernel reads a weight: FP8 in whole blocks, with scales by block or by output."""
    return kernel.is_fp8 and kernel.codes.shape[-1] == BLOCK and kernel.order is None


def has_output_scales(kernel: CodedWeight) -> bool:
    """Whether all inputs of an output share its scale."""
    return kernel.columns == kernel.width


def runs_here() -> bool:
    """Whether the GPU multiplies FP8, from compute capability 8.9 on."""
    capability = getattr(device(), "compute_capability", None)
    return capability is not None and tuple(map(int, capability.split("."))) >= (8, 9)
