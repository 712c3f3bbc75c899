from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.rms_norm import rms_norm

OP = rms_norm


def arguments(*shape):
    rng = np.random.default_rng(shape[-1])
    x = rng.standard_normal(shape, np.float32)
    return jnp.asarray(x), jnp.asarray(rng.standard_normal(shape[-1], np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (4, 576), (0, 8)])
def test_equals_the_formula_in_float64(shape, implementation):
    x, factors = arguments(*shape)
    normed = jax.jit(lambda *args: OP(*args, 1e-5, implementation=implementation))(x, factors)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(factors)
    np.testing.assert_allclose(normed, expected, rtol=1e-6, atol=1e-7)


def test_a_row_is_normed_the_same_to_the_last_bit_in_any_company(implementation):
    x, factors = arguments(40, 576)
    norm = jax.jit(lambda x: OP(x, factors, 1e-5, implementation=implementation))
    alone = norm(x[:1])
    for rows in (2, 3, 4, 7, 8, 9, 12, 16, 40):
        np.testing.assert_array_equal(norm(x[:rows])[:1], alone)


def test_it_can_be_trained_through(implementation):
    x, factors = arguments(3, 7)

    def loss(x, factors, name):
        return (OP(x, factors, 1e-5, implementation=name) ** 3).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for one, other in zip(gradient(x, factors, implementation), gradient(x, factors, "xla"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    of_a_row = jax.jit(jax.vmap(jax.grad(partial(loss, name=implementation)), in_axes=(0, None)))
    expected, _ = gradient(x, factors, "xla")
    np.testing.assert_allclose(of_a_row(x, factors), expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_harms_no_other(implementation):
    x, factors = arguments(3, 7)
    normed = OP(x.at[1, 2].set(jnp.nan), factors, 1e-5, implementation=implementation)
    assert np.isnan(normed).any(axis=1).tolist() == [False, True, False]
