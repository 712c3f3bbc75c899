"""Fixtures for sampling tests."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import SamplingState


@pytest.fixture
def sampling_state():
    """Builds a SamplingState with seeds 0, 1, 2, …; a parameter is one for all slots or one per slot."""

    def build(slots, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, first_seed=0):
        def rows(value, dtype):
            return jnp.broadcast_to(jnp.asarray(value, dtype), (slots,))

        low = jnp.arange(slots, dtype=jnp.uint32) + jnp.uint32(first_seed)
        return SamplingState(
            temperature=rows(temperature, jnp.float32),
            top_k=rows(top_k, jnp.int32),
            top_p=rows(top_p, jnp.float32),
            min_p=rows(min_p, jnp.float32),
            seed=jnp.stack([low, jnp.full_like(low, 7)], axis=-1),
        )

    return build


@pytest.fixture
def chi_square_excess():
    """How far a chi-square statistic lies above its degrees of freedom, in units of its limit.

    The limit is 10 sqrt(2 df), as in vLLM's tests: below 1 passes.
    """

    def excess(counts, probabilities):
        counts, probabilities = np.ravel(counts), np.ravel(probabilities)
        possible = probabilities > 0
        assert counts[~possible].sum() == 0
        observed = counts[possible]
        expected = probabilities[possible] * counts.sum()
        assert expected.min() > 5
        statistic = ((observed - expected) ** 2 / expected).sum()
        freedom = possible.sum() - 1
        return (statistic - freedom) / (10 * np.sqrt(2 * freedom))

    return excess
