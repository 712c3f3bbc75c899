"""Product with a weight in codes in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight


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
