"""Product with a weight in codes in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.op import device, why_not
from jaxspec_kernels.packed_matmul.coded_weight import BLOCK_WORDS, TILE, CodedWeight

HOPPER_ROWS = 2048
"""Up to so many rows take no longer with the codes than with the expanded weight, on an H200."""


def packed_matmul(x: jax.Array, kernel: CodedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x @ kernel, with the exact values of the weight.

    Args:
      x: [..., M].
      kernel: [M, out axes].
      out_dtype: the dtype of the result; that of x by default.

    Returns:
      [..., out axes]; sums are float32.
    """
    sums = lax.dot_general(
        x.astype(jnp.float32), kernel.dense(), (((x.ndim - 1,), (0,)), ((), ())), precision="highest"
    )
    return sums.astype(out_dtype or x.dtype)


def is_for_hopper(kernel: CodedWeight) -> bool:
    """Whether this GPU is of the Hopper generation, and its kernel for many rows reads the weight."""
    is_hopper = getattr(device(), "compute_capability", None) == "9.0" and why_not("triton") is None
    is_tiled = kernel.block_words == BLOCK_WORDS and kernel.codes.shape[-2] in (1, TILE)
    return is_hopper and is_tiled and kernel.offset is None
