"""Products with packed experts on a CPU: rows that depend on no other row, and what is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.expert_matmul import (
    MAX_SCALE,
    PackedExperts,
    expert_matmul,
    pack_mxfp4,
    stack_experts,
    stack_mxfp4,
)
from jaxspec_kernels.matmul import pack
from packed_weights import FORMS, OUTPUTS, WIDTH, experts

pytestmark = pytest.mark.skipif(
    expert_matmul.why_not("numba") is not None, reason=f"{expert_matmul.why_not('numba')}"
)
numba_kernel = pytest.importorskip("jaxspec_kernels.expert_matmul.numba_kernel", reason="needs Numba")
numba_int8 = pytest.importorskip("jaxspec_kernels.matmul.numba_int8", reason="needs Numba")

CHOSEN = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0])
"""Eight rows, four and two of one expert, three of another, none of the last."""


def rows(count=CHOSEN.size):
    x = np.random.default_rng(1).standard_normal((count, WIDTH), np.float32)
    x[:, :32] *= 100
    return jnp.asarray(x)


def product(x, chosen, weights, **settings):
    y = numba_kernel.expert_matmul(x, jnp.asarray(chosen, jnp.int32), weights, **settings)
    return np.asarray(y).reshape(len(x), OUTPUTS)


@pytest.mark.parametrize("form", FORMS)
def test_dense_experts_are_the_values(form):
    weights, values = experts(form, "float32")
    assert (weights.shape, weights.ndim, weights.size) == ((3, WIDTH, 2, OUTPUTS // 2), 4, values.size)
    dense = np.asarray(weights)
    assert dense.dtype == weights.dtype
    np.testing.assert_array_equal(dense, values.reshape(weights.shape))


@pytest.mark.parametrize("path", numba_int8.available_paths()[1:])
def test_every_path_gives_the_same_numbers(path):
    weights, _ = experts("MXFP4", "int8")
    best = product(rows(), CHOSEN, weights)
    np.testing.assert_array_equal(product(rows(), CHOSEN, weights, path=path), best)


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_a_row_does_not_depend_on_those_beside_it(activations):
    weights, _ = experts("MXFP4", activations)
    x = rows()
    alone = np.concatenate([product(x[i : i + 1], CHOSEN[i : i + 1], weights) for i in range(len(x))])
    for count in (3, len(x)):
        np.testing.assert_array_equal(product(x[:count], CHOSEN[:count], weights), alone[:count])
    order = np.random.default_rng(2).permutation(len(x))
    np.testing.assert_array_equal(product(x[order], CHOSEN[order], weights), alone[order])


def test_an_expert_that_there_is_not_reads_nothing_outside():
    weights, _ = experts("MXFP4", "int8")
    x = jnp.tile(rows(1), (4, 1))
    y = product(x, [-5, 0, 2, 2**30], weights)
    np.testing.assert_array_equal(y[0], y[1])
    np.testing.assert_array_equal(y[2], y[3])


def test_outputs_that_fill_no_tile_take_none_of_the_next_expert():
    ones, scale = np.ones((5, 64), np.uint8), np.full((5, 2), 127, np.uint8)
    parts = [pack(ones * code, scale, None, (64, 5)) for code in (2, 4, 7)]
    weights = jax.tree.map(jnp.asarray, stack_experts(parts))
    assert isinstance(weights, PackedExperts)
    y = numba_kernel.expert_matmul(jnp.ones((3, 64)), jnp.asarray([2, 0, 1]), weights)
    # Twice the values of the codes 7, 2 and 4.
    np.testing.assert_array_equal(y, np.repeat([[64 * 12.0], [64 * 2.0], [64 * 4.0]], 5, axis=1))


@pytest.mark.parametrize("outputs", [(2, 5), (32,), (70,)])
def test_mxfp4_of_a_checkpoint_is_what_other_kernels_read(outputs):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (3, 32, *outputs), np.uint8)
    scale = rng.integers(100, MAX_SCALE + 1, (3, 2, *outputs), np.uint8)
    weights = stack_mxfp4(values, scale, activations="int8")
    assert (weights.shape, weights.stack.form, weights.stack.activations) == (
        (3, 64, *outputs),
        "mxfp4",
        "int8",
    )
    np.testing.assert_array_equal(np.asarray(weights), np.asarray(pack_mxfp4(values, scale), np.float32))


def test_scales_of_different_experts_have_one_dtype():
    values = np.ones((3, 32), np.int8)
    exact, inexact = (np.full((3, 1), scale, np.float32) for scale in (0.5, 0.1))
    both = stack_experts([pack(values, scale, None, (32, 3)) for scale in (exact, inexact)])
    assert both.stack.scale.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(both), np.stack([(values * exact).T, (values * inexact).T]))
