"""Random experts in MXFP4."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.expert_matmul import BLOCK, Mxfp4Weight


def random_mxfp4(key: jax.Array, shape: tuple[int, ...]) -> Mxfp4Weight:
    """Random weights [E, M, out axes], scaled so that outputs are about as large as inputs."""
    (count, width, *outputs), (words, scales) = shape, jax.random.split(key)
    return Mxfp4Weight(
        jax.random.bits(words, (count, *outputs, width // 4), jnp.uint16),
        jax.random.randint(scales, (count, width // BLOCK, *outputs), 118, 124).astype(jnp.uint8),
    )
