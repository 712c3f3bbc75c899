"""Products with a weight in codes in pure JAX."""

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


def gated_packed_matmul(x: jax.Array, gate_up: CodedWeight) -> jax.Array:
    """SiLU of gates times ups, where both are products with the exact values of a weight.

    Args:
      x: [..., M].
      gate_up: [M, 2, F], gate first.

    Returns:
      [..., F], of the dtype of x.
    """
    return gate(packed_matmul(x, gate_up))


def gate(fused: jax.Array) -> jax.Array:
    """SiLU of gates times ups, [..., F], from both, [..., 2, F]."""
    return jax.nn.silu(fused[..., 0, :]) * fused[..., 1, :]
