import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.families.gemma.gemma3 import Gemma3Norm
from jaxspec.models.layers.transformer import RMSNorm


@pytest.mark.parametrize("width", [7, 60, 576])
@pytest.mark.parametrize("kind", [RMSNorm, Gemma3Norm])
def test_a_row_is_normed_the_same_to_the_last_bit_in_any_company(kind, width):
    norm = kind(width, 1e-5, "norm", dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(width).standard_normal((40, width), np.float32)
    alone = jax.jit(norm)(x[:1])
    wide = x[:1].astype(np.float64)
    np.testing.assert_allclose(alone, wide / np.sqrt((wide**2).mean() + 1e-5), rtol=1e-6)
    for rows in (2, 3, 4, 7, 8, 9, 12, 16, 40):
        np.testing.assert_array_equal(jax.jit(norm)(x[:rows])[:1], alone)
