from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.argmax import argmax


@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 1000])
def test_equals_jnp_argmax_ties_included(vocabulary):
    x = jnp.asarray(np.random.default_rng(vocabulary).integers(-3, 3, (4, 3, vocabulary)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(argmax)(x), np.argmax(x, -1))


def test_first_nan_wins():
    x = np.zeros((2, 300), np.float32)
    x[0, 5], x[0, 200], x[0, 260] = 9.0, np.nan, np.nan
    np.testing.assert_array_equal(jax.jit(argmax)(x), [200, 0])


def test_all_masked_gives_the_first_token():
    assert argmax(jnp.full((1, 130), -jnp.inf))[0] == 0


def test_no_rows():
    assert argmax(jnp.zeros((2, 0, 130))).shape == (2, 0)


@pytest.mark.parametrize("parts", [2, 3])
def test_over_parts_equals_the_whole_ties_and_nan_included(parts):
    """A mapped axis stands for that of a mesh."""
    x = np.random.default_rng(parts).integers(-3, 3, (50, 3, 12)).astype(np.float32)
    x[::5, 1, 4:] = np.nan
    x[::7, 2] = -np.inf
    of_parts = np.stack(np.split(x, parts, axis=-1))
    best = jax.jit(jax.vmap(partial(argmax, axis="devices"), axis_name="devices"))(of_parts)
    for on_device in best:
        np.testing.assert_array_equal(on_device, np.argmax(x, -1))
