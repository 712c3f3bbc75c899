"""Product of rows rounded to FP8 with a weight in FP8, in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.reference import packed_matmul

BLOCK = 128
"""Inputs of a block of the weight."""
LARGEST = 448
"""The largest number of float8_e4m3fn."""


def fp8_matmul(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """`packed_matmul` with x rounded by `round_to_fp8`.

    Args:
      x: [..., M].
      kernel: [M, out axes]; one that `reads` is true for.
      out_dtype: the dtype of the result; that of x by default.

    Returns:
      [..., out axes]; sums are float32.
    """
    # On a GPU, XLA would leave out a rounding whose result it reads as float32 again.
    values, scale = lax.optimization_barrier(round_to_fp8(x))
    return packed_matmul(values.astype(jnp.float32) * scale, kernel, out_dtype=out_dtype or x.dtype)


def round_to_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds the rows of x [..., M], whose largest magnitudes become `LARGEST`.

    Returns:
      float8_e4m3fn[..., M] and scales f32[..., 1]; their products are the rounded numbers.
    """
    rows = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    # Rows that are zero, or so small that LARGEST / largest overflows, are rounded to zero.
    values = rows * jnp.where(largest > 2.0**-100, LARGEST / largest, 0)
    return values.astype(jnp.float8_e4m3fn), largest / LARGEST


def reads(kernel: CodedWeight) -> bool:
    """Whether the kernel reads a weight: FP8 in whole blocks, with scales by block or by channel."""
    is_fp8 = kernel.bits == 8 and not kernel.is_int8
    return is_fp8 and kernel.codes.shape[-1] == BLOCK and kernel.order is None
