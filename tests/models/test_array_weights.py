"""Weights in memory become the parameters that the same weights in a file become."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import golden_checkpoint

from jaxspec.checkpoints import Checkpoint
from jaxspec.models.array_weights import overwrite
from jaxspec.models.loading import load_target, plan_target_update, plan_weights

FAMILIES = (
    "llama-tied",
    "qwen2-tied",
    "qwen3-tied",
    "qwen3-moe",
    "gemma3",
    "glm4",
    "glm4-moe-lite",
    "deepseek-v3",
    "gpt-oss",
    "gpt-oss-mxfp4",
)


def leaves(module):
    return jax.tree.leaves(nnx.state(module))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    checkpoint = golden_checkpoint(name)
    arrays = {name: jnp.asarray(tensor.read()) for name, tensor in checkpoint.tensors.items()}
    dtype = jnp.dtype(jnp.float32)
    expected = leaves(load_target(checkpoint, dtype=dtype))
    bare = Checkpoint("config.json", checkpoint.config, {})
    target = plan_weights(bare, arrays, None, dtype=dtype).read()
    for own, other in zip(leaves(target), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    halved = {name: array * 0 for name, array in arrays.items()}
    overwrite([plan_target_update(target, halved, None).parameters])
    assert all(not leaf.any() for leaf in leaves(target))
    overwrite([plan_target_update(target, arrays, None).parameters])
    for own, other in zip(leaves(target), expected, strict=True):
        np.testing.assert_array_equal(own, other)
