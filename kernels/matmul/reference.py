"""Product in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.matmul.packed_weight import ROW_BLOCK, PackedWeight


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x @ kernel.

    Args:
      x: [..., M].
      kernel: [M, out axes]; a packed one is multiplied as the float32 weight that it stands for, with x
        rounded where the weight's `activations` say so.
      out_dtype: of the result; the dtype of x by default.

    Returns:
      [..., out axes]; sums are float32 on every backend.
    """
    if isinstance(kernel, PackedWeight):
        if kernel.activations == "int8":
            x = round_rows(x)
        kernel = kernel.dense()
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        # Without "highest" a GPU would round float32 operands to TF32, and greedy equality with them.
        precision="highest" if kernel.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x.dtype,
    )


def round_rows(x: jax.Array) -> jax.Array:
    """x [..., M] as 8 bits give it back: blocks of 16 are d * q, d their largest magnitude / 127."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // ROW_BLOCK, ROW_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Zero, and what has no inverse; that is nothing beside any other block.
    integers = jnp.round(blocks * jnp.where(largest > 2.0**-100, 127 / largest, 0))
    return (integers * (largest / 127)).reshape(x.shape)
