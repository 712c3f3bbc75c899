"""Product and sum in pure JAX."""

import jax
from jaxspec_kernels.matmul import matmul


def matmul_add(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> jax.Array:
    """residual + x @ kernel.

    Args:
      x: [..., F].
      kernel: [F, M].
      residual: [..., M].

    Returns:
      [..., M] in the dtype of `x`; sums are float32, and rounded before the residual is added.
    """
    return residual + matmul(x, kernel)
