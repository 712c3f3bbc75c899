"""Product and sum in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def matmul_add(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> jax.Array:
    """residual + x @ kernel.

    Args:
      x: [..., F].
      kernel: [F, M].
      residual: [..., M].

    Returns:
      [..., M] in the dtype of `x`; sums are float32, and rounded before the residual is added.
    """
    return residual + lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        # Without "highest" a GPU would round float32 operands to TF32.
        precision="highest" if kernel.dtype == jnp.float32 else None,
        preferred_element_type=x.dtype,
    )
