"""A weight in codes as a dense one, in pure JAX."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight


def dequantize_codes(x: jax.Array, kernel: CodedWeight) -> jax.Array:
    """The weight in bfloat16, [M, out axes], as a network without codes holds it.

    Args:
      x: what the weight is about to be multiplied with; it is not read. A dequantized weight that waited for
        nothing could be made long before it is used, and all of a program's at once would fill the memory.
      kernel: with one axis of inputs.
    """
    return kernel.dense().astype(jnp.bfloat16)
