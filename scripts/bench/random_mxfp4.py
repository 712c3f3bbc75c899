"""Random experts in MXFP4."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.expert_matmul import BLOCK, Mxfp4Weight

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.moe import MoE


def random_mxfp4(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Mxfp4Weight:
    """Weights [E, M, out axes] whose outputs are about as large as their inputs."""
    assert dtype == jnp.bfloat16
    (count, width, *outputs), (words, scales) = shape, jax.random.split(key)
    return Mxfp4Weight(
        jax.random.bits(words, (count, *outputs, width // 4), jnp.uint16),
        jax.random.randint(scales, (count, width // BLOCK, *outputs), 118, 124).astype(jnp.uint8),
    )


def with_packed_experts(family: type[Decoder]) -> type[Decoder]:
    """A family whose random networks have experts in MXFP4; never more than one layer's are dense."""

    class Packed(family):  # type: ignore[misc, valid-type]
        @classmethod
        def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
            layer: Any = super().make_layer(config, index, **args)
            assert isinstance(layer.mlp, MoE)
            for i, weight in enumerate((layer.mlp.gate_up, layer.mlp.down)):
                dense = weight.get_value()
                weight.set_value(random_mxfp4(jax.random.key(2 * index + i), dense.shape, dense.dtype))
            return layer

    return Packed
