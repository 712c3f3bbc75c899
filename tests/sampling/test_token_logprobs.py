"""The most likely tokens of wide rows, which are found group by group, and which programs report what."""

import jax.numpy as jnp
import numpy as np
import pytest
from optimised import optimised

from jaxspec import SamplingParams
from jaxspec.sampling import Logprobs, required_logprobs, sample_seed, token_logprobs
from jaxspec.sampling.logits import log_sum_exp
from jaxspec.sampling.logprobs import largest


@pytest.mark.parametrize("size", [7, 3000, 5001])
def test_the_largest_values_are_found_in_order(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(3, 2, size)).astype(np.float32)
    x[0, 0] = np.round(x[0, 0])  # many equal ones
    x[1, 0, : size - 5] = -np.inf
    x[2, 1, :] = np.arange(size) if size < 5000 else np.arange(size)[::-1]
    values, places = map(np.asarray, largest(jnp.asarray(x), 20))
    assert values.shape == (3, 2, min(20, size))
    np.testing.assert_array_equal(values, np.sort(x)[..., ::-1][..., :20])
    np.testing.assert_array_equal(np.take_along_axis(x, places, -1), values)
    assert all(len(set(row)) == len(row) for row in places.reshape(6, -1).tolist())


def test_bfloat16_rows_are_summed_in_float32():
    x = jnp.zeros((1, 40000), jnp.bfloat16)
    found = token_logprobs(x, jnp.array([3]), Logprobs.TOP)
    np.testing.assert_allclose(found.chosen, -np.log(40000), rtol=1e-6)
    np.testing.assert_allclose(found.top, -np.log(40000), rtol=1e-6)


def test_numbers_do_not_depend_on_the_rows_beside():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(960, 64)), jnp.float32)
    chosen = optimised(lambda x: token_logprobs(x, jnp.argmin(x, axis=-1), Logprobs.CHOSEN).chosen)
    for rows in (1, 2, 3, 5, 6, 7, 11, 15, 16):
        parts = [x[i : i + rows] for i in range(0, 960 - rows, rows)]
        for each in (chosen, optimised(log_sum_exp)):
            found = np.concatenate([each(part) for part in parts])
            np.testing.assert_array_equal(found, each(x)[: len(found)])


def test_the_least_report_that_serves():
    asked = [required_logprobs(SamplingParams(logprobs=count)) for count in (None, 0, 1, 20)]
    assert asked == [Logprobs.NONE, Logprobs.CHOSEN, Logprobs.TOP, Logprobs.TOP]


def test_samples_have_seeds_of_their_own():
    assert sample_seed(5, 0) == 5
    seeds = {sample_seed(seed, sample) for seed in range(20) for sample in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**64 for seed in seeds)
