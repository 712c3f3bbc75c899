import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.process_logits.threshold import kth_largest, mass_threshold

ROWS = np.stack(
    [
        np.random.default_rng(0).normal(size=37) * 10,
        np.abs(np.random.default_rng(1).normal(size=37)),
        -np.abs(np.random.default_rng(2).normal(size=37)),
        np.random.default_rng(3).integers(-2, 3, 37),
        np.where(np.arange(37) < 30, -np.inf, np.arange(37)),
        np.geomspace(1e-37, 3e38, 37) * np.where(np.arange(37) % 2, 1, -1),
    ]
).astype(np.float32)


@pytest.mark.parametrize("digit_bits", [1, 4])
@pytest.mark.parametrize("k", [1, 2, 7, 36, 37])
def test_kth_largest_is_exact(k, digit_bits):
    found = kth_largest(jnp.asarray(ROWS), jnp.full(len(ROWS), k), digit_bits=digit_bits)
    np.testing.assert_array_equal(found, np.sort(ROWS, axis=-1)[:, -k])


@pytest.mark.parametrize("digit_bits", [1, 4])
def test_kth_largest_of_too_few_is_minus_infinity(digit_bits):
    found = kth_largest(jnp.asarray(ROWS), jnp.full(len(ROWS), 38), digit_bits=digit_bits)
    assert (found == -jnp.inf).all()


@pytest.mark.parametrize("digit_bits", [1, 4])
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.53, 0.999])
def test_mass_threshold_is_exact(share, digit_bits):
    weight = np.random.default_rng(4).integers(1, 100, ROWS.shape).astype(np.float32)  # exact sums
    mass = np.float32(share) * weight.sum(-1)
    found = mass_threshold(jnp.asarray(ROWS), jnp.asarray(weight), jnp.asarray(mass), digit_bits=digit_bits)
    for row, w, m, threshold in zip(ROWS, weight, mass, np.asarray(found), strict=True):
        assert threshold == max(t for t in row if w[row >= t].sum() >= m)


def test_a_mass_that_is_reached_exactly_is_enough():
    weight = np.random.default_rng(4).integers(1, 100, ROWS.shape).astype(np.float32)
    at_least = np.sort(ROWS, axis=-1)[:, -5]
    mass = np.where(at_least[:, None] <= ROWS, weight, 0).sum(-1)
    found = mass_threshold(jnp.asarray(ROWS), jnp.asarray(weight), jnp.asarray(mass), digit_bits=4)
    np.testing.assert_array_equal(found, at_least)


def test_mass_out_of_reach_is_minus_infinity():
    found = mass_threshold(jnp.asarray(ROWS), jnp.ones(ROWS.shape), jnp.full(len(ROWS), 38.0), digit_bits=4)
    assert (found == -jnp.inf).all()
