"""Norm and product in pure JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.matmul import matmul


def rms_matmul(
    x: jax.Array, scale: jax.Array, kernel: jax.Array, *, eps: float, gated: bool = False
) -> jax.Array:
    """norm(x) @ kernel, or silu(norm(x) @ gate) * (norm(x) @ up).

    Args:
      x: [..., M].
      scale: [M], of the norm, which is computed in float32.
      kernel: [M, out axes]; where `gated`, [M, 2, F] with the gate first.
      eps: of the norm.
      gated: whether the product is a gated pair.

    Returns:
      [..., out axes], or [..., F] where `gated`, in the dtype of `x`; sums are float32.
    """
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y = matmul(wide.astype(x.dtype) * scale, kernel)
    return jax.nn.silu(y[..., 0, :]) * y[..., 1, :] if gated else y
