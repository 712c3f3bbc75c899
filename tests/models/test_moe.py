"""Routed experts: both ways of running them agree, and a tie goes to the lower index."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import assert_close, golden_checkpoint

from jaxspec.models.loading import load_target


@pytest.fixture(scope="module")
def moe():
    return load_target(golden_checkpoint("gpt-oss"), dtype=jnp.float32).layers[0].mlp


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_running_the_chosen_experts_equals_running_every_one(moe, rows):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 32)), jnp.float32)

    @jax.jit
    def outputs(x):
        weights, chosen = moe.route(x)
        return moe._chosen(x, weights, chosen), moe(x[None])[0], moe._every(x, weights, chosen)

    *found, every = outputs(x)
    for each in found:
        assert_close(each, np.asarray(every), relative=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_shares_of_the_chosen_or_of_all(moe, normalize):
    graph, state = nnx.split(moe)
    other = nnx.merge(graph, state)
    other.config = dataclasses.replace(moe.config, normalize=normalize)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 32)), jnp.float32)
    weights, chosen = other.route(x)
    shares = np.asarray(nnx.softmax(other.router(x)))
    expected = np.take_along_axis(shares, np.asarray(chosen), axis=1)
    if normalize:
        expected = expected / expected.sum(axis=1, keepdims=True)
    assert_close(weights, expected, relative=1e-5)


def test_a_tie_goes_to_the_lower_index(moe):
    """Experts 1 and 2 have equal router rows: whenever only one of them is chosen, it is expert 1."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(200, 32)), jnp.float32)
    _, chosen = moe.route(x)
    chosen = np.asarray(chosen)
    first, second = (chosen == 1).any(axis=1), (chosen == 2).any(axis=1)
    assert (first & ~second).any()
    assert not (second & ~first).any()
