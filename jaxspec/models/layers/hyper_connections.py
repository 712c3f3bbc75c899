"""Several residual streams, mixed by manifold-constrained hyper-connections.

Source: DeepSeek-V4 in transformers 5.24, `modeling_deepseek_v4.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.rms_norm import mean_of_squares
from jaxspec_kernels.sinkhorn import sinkhorn

from jaxspec.config import ModelConfig
from jaxspec.weights.parameters import Whole, parameter

_FLOAT32 = jnp.dtype(jnp.float32)


class StreamWeights(nnx.Module):
    """Weights that a linear layer computes from all streams of a row together; float32.

    Args:
      config: has `streams`.
      outputs: the number of weights.
      scales: into how many parts they fall, each with a factor of its own.
      names: of the matrix, the biases and the factors in a checkpoint.
    """

    def __init__(
        self, config: ModelConfig, outputs: int, scales: int, names: tuple[str, str, str], *, rngs: nnx.Rngs
    ):
        assert config.streams is not None
        width = config.streams.count * config.hidden_size
        self.eps = config.rms_norm_eps
        matrix, base, scale = names

        def declare(name: str, shape: tuple[int, ...], init: str) -> nnx.Param:
            axes = (None,) * len(shape)
            return parameter(rngs, shape, axes, Whole(name, shape), dtype=_FLOAT32, init=init, fan_in=width)

        self.matrix = declare(matrix, (outputs, width), "normal")
        self.base = declare(base, (outputs,), "zeros")
        self.scale = declare(scale, (scales,), "ones")

    def __call__(self, streams: jax.Array) -> jax.Array:
        """f32[N, outputs], before scales and biases, of streams [N, streams, M]."""
        flat = streams.reshape(len(streams), -1).astype(jnp.float32)
        flat = flat * lax.rsqrt(mean_of_squares(flat) + self.eps)
        return jnp.einsum("nc,oc->no", flat, self.matrix[...], precision="highest")


class HyperConnection(nnx.Module):
    """What a block reads of the streams, and how its output comes back into them."""

    def __init__(self, config: ModelConfig, name: str, *, rngs: nnx.Rngs):
        assert config.streams is not None
        self.config = config.streams
        count = config.streams.count
        names = (f"{name}.fn", f"{name}.base", f"{name}.scale")
        self.weights = StreamWeights(config, (2 + count) * count, 3, names, rngs=rngs)

    def __call__(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Takes streams [N, streams, M].

        Returns:
          The block's input [N, M]; how much of its output each stream gets, f32[N, streams]; and the mix of
          the streams, f32[N, streams, streams], from the first axis to the second.
        """
        count, eps = self.config.count, self.config.eps
        mixes, base, scale = self.weights(streams), self.weights.base[...], self.weights.scale[...]
        read, written, mix = (
            part * scale[i] + bias
            for i, (part, bias) in enumerate(
                zip(
                    jnp.split(mixes, (count, 2 * count), axis=-1),
                    jnp.split(base, (count, 2 * count)),
                    strict=True,
                )
            )
        )
        mix = sinkhorn(mix.reshape(-1, count, count), iterations=self.config.iterations, eps=eps)
        return _collapsed(streams, jax.nn.sigmoid(read) + eps), 2 * jax.nn.sigmoid(written), mix


class StreamHead(nnx.Module):
    """One hidden state [N, M] of all streams [N, streams, M] after the last layer."""

    def __init__(self, config: ModelConfig, name: str, *, rngs: nnx.Rngs):
        assert config.streams is not None
        self.eps = config.streams.eps
        names = (f"{name}.hc_fn", f"{name}.hc_base", f"{name}.hc_scale")
        self.weights = StreamWeights(config, config.streams.count, 1, names, rngs=rngs)

    def __call__(self, streams: jax.Array) -> jax.Array:
        mixes = self.weights(streams) * self.weights.scale[...] + self.weights.base[...]
        return _collapsed(streams, jax.nn.sigmoid(mixes) + self.eps)


def expand(output: jax.Array, streams: jax.Array, written: jax.Array, mix: jax.Array) -> jax.Array:
    """The streams [N, streams, M] after a block with this output [N, M]; see `HyperConnection`."""
    dtype = streams.dtype
    precision = "highest" if dtype == jnp.float32 else None
    mixed = jnp.einsum("nij,nim->njm", mix.astype(dtype), streams, precision=precision)
    return written.astype(dtype)[..., None] * output[:, None] + mixed


def _collapsed(streams: jax.Array, weights: jax.Array) -> jax.Array:
    return (weights[..., None] * streams).sum(axis=1).astype(streams.dtype)
