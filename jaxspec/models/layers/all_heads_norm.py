"""Attention whose norm of queries takes the entries of all heads together, and so does that of keys."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.rms_norm import mean_of_squares, rms_norm

from jaxspec.config import ModelConfig
from jaxspec.models.layers.transformer import Attention
from jaxspec.sharding import num_parts, psum, split_over
from jaxspec.weights.parameters import Projection, parameter


class AllHeadsNorm(nnx.Module):
    """Root-mean-square norm over the last three axes, computed in float32.

    Args:
      shape: (key/value heads, heads of each, D).
      copies: how often each key/value head is held; a checkpoint has it once.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        eps: float,
        name: str,
        *,
        copies: int = 1,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.eps = eps
        source = Projection(f"{name}.weight", (), shape, copies=copies)
        axes = ("kv_heads", "group", "head_dim")
        self.scale = parameter(rngs, shape, axes, source, dtype=dtype, init="ones")

    def factors(self) -> jax.Array:
        """f32[entries of this device's heads], the factors of normed rows."""
        return self.scale[...].astype(jnp.float32).reshape(-1)

    def __call__(self, x: jax.Array, mean: jax.Array | None = None) -> jax.Array:
        """Norms x [N, ...]; `mean` f32[N, 1] is that of all devices' squares, if x is a part."""
        rows = x.reshape(len(x), -1).astype(jnp.float32)
        if mean is None:
            normed = rms_norm(rows, self.factors(), self.eps)
        else:
            normed = rows * lax.rsqrt(mean + self.eps) * self.factors()
        return normed.reshape(x.shape).astype(x.dtype)


class AllHeadsAttention(Attention):
    """Attention with these norms."""

    def head_norms(self, config: ModelConfig, name: str, **args: Any) -> tuple[nnx.Module, nnx.Module]:
        heads, size, eps = config.num_cached_heads, config.head_dim, config.rms_norm_eps
        queries = (heads, config.num_attention_heads // heads, size)
        return (
            AllHeadsNorm(queries, eps, f"{name}.q_norm", **args),
            # Every head has as many copies, so copies leave the mean as it is.
            AllHeadsNorm((heads, 1, size), eps, f"{name}.k_norm", copies=config.kv_copies, **args),
        )

    def normed(self, queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        axis = split_over(queries.shape[1], self.kv_heads)
        if axis is None:
            return self.query_norm(queries), self.key_norm(keys)
        rows = (x.reshape(len(x), -1).astype(jnp.float32) for x in (queries, keys))
        means = psum(jnp.concatenate([*map(mean_of_squares, rows)], axis=-1), axis) / num_parts()
        return self.query_norm(queries, means[:, :1]), self.key_norm(keys, means[:, 1:])
