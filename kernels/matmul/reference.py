"""Product in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.matmul.packed_weight import PackedWeight


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x @ kernel.

    Args:
      x: [..., M].
      kernel: [M, out axes]; a packed one is multiplied as the float32 weight that it stands for.
      out_dtype: of the result; the dtype of x by default.

    Returns:
      [..., out axes]; sums are float32 on every backend.
    """
    if isinstance(kernel, PackedWeight):
        kernel = kernel.dense()
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        # Without "highest" a GPU would round float32 operands to TF32, and greedy equality with them.
        precision="highest" if kernel.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x.dtype,
    )
