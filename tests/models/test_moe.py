"""Routed experts: both ways of running them agree, and a tie goes to the lower index."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import assert_close, golden_checkpoint
from jaxspec_kernels.op import recorded

from jaxspec.models.layers import moe as moe_module
from jaxspec.models.layers.moe import MoE
from jaxspec.models.target import load_target


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


class Curved(MoE):
    def activate(self, gate, up):
        return jax.nn.silu(gate) * up


@pytest.mark.parametrize("change", [None, "an activation of its own", "biases"])
def test_plain_experts_gate_their_rows_in_an_operation_with_products(monkeypatch, change):
    moe = load_target(golden_checkpoint("qwen3-moe"), dtype=jnp.float32).layers[0].mlp
    assert type(moe) is MoE
    if change == "biases":
        count, _, *outputs = moe.gate_up.shape
        moe.gate_up_bias = nnx.data(nnx.Param(jnp.ones((count, *outputs))))
    elif change:
        moe.__class__ = Curved
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, moe.router.in_width)), jnp.float32)

    def run():
        with recorded() as results:
            y = jax.jit(lambda x: moe._chosen(x, *moe.route(x)))(rows)
        return y, [name for name, _ in results if "expert_matmul" in name]

    apart, names = run()
    assert names == ["expert_matmul"] * 2
    monkeypatch.setattr(moe_module, "gates_experts", lambda dtype, weights: True)
    gated, names = run()
    assert names == ["expert_matmul" if change else "gated_expert_matmul", "expert_matmul"]
    assert_close(gated, np.asarray(apart), relative=1e-5)
