"""Product in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.matmul.packed_weight import PackedWeight


def matmul(
    x: jax.Array, kernel: jax.Array | PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """x @ kernel.

    Args:
      x: [..., M].
      kernel: [M, out axes]. A packed one is dequantized to float32; if its `activations` are "int8", x is
        rounded first.
      out_dtype: the dtype of the result; that of x by default.

    Returns:
      [..., out axes]; sums are float32 on every backend.
    """
    if isinstance(kernel, PackedWeight):
        if kernel.activations == "int8":
            x = round_rows(x, kernel.row_block)
        kernel = kernel.dense()
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        # Without "highest" a GPU rounds float32 operands to TF32, which can change greedy tokens.
        precision="highest" if kernel.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x.dtype,
    )


def round_rows(x: jax.Array, block: int) -> jax.Array:
    """Rounds x [..., M] to 8 bits: every block becomes d * q with d = largest magnitude / 127, q integers."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Blocks that are zero, or so small that 127 / largest overflows, are rounded to zero.
    integers = jnp.round(blocks * jnp.where(largest > 2.0**-100, 127 / largest, 0))
    return (integers * (largest / 127)).reshape(x.shape)
