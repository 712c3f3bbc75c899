"""Sums over devices that are computed when they are needed. Here every sum finds its term on two devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspec_kernels import collectives

from jaxspec import sharding
from jaxspec.models.layers.transformer import RMSNorm
from jaxspec.sharding import PendingSum, later_add, later_psum, total

ROWS = jnp.asarray([[1.0, 2.0], [3.0, 5.0]])
STREAM = jnp.asarray([[10.0, 20.0], [30.0, 40.0]])
BIAS = jnp.asarray([100.0, 200.0])


@pytest.fixture
def sums(monkeypatch):
    """The terms that were summed, in order."""
    found = []

    def psum(x, axis):
        assert axis == "tensor"
        found.append(x)
        return 2 * x

    monkeypatch.setattr(collectives, "psum", psum)
    return found


def pending(part=ROWS):
    return later_psum(part, "tensor")


def test_nothing_is_summed_on_one_device(sums):
    assert later_psum(ROWS, None) is ROWS
    assert total(ROWS) is ROWS
    assert sums == []


def test_a_sum_is_computed_once_and_only_if_it_is_needed(sums):
    y = STREAM + (pending() + BIAS)
    assert isinstance(y, PendingSum)
    assert sums == []
    for _ in range(2):
        np.testing.assert_array_equal(total(y), 2 * ROWS + BIAS + STREAM)
    assert len(sums) == 1


def test_sums_that_are_added_become_one(sums):
    np.testing.assert_array_equal(total(STREAM + (pending() + pending(STREAM))), 2 * (ROWS + STREAM) + STREAM)
    assert len(sums) == 1


@pytest.mark.parametrize(
    ("added", "expected", "count"),
    [
        (lambda: (pending() + BIAS) + pending(STREAM), 2 * ROWS + BIAS + 2 * STREAM, 1),
        (lambda: pending() + (STREAM + pending()), 4 * ROWS + STREAM, 1),
        (lambda: (pending() + BIAS) + (pending() + STREAM), 4 * ROWS + BIAS + STREAM, 2),
        (lambda: (pending() + BIAS) + BIAS, 2 * ROWS + 2 * BIAS, 1),
        (lambda: (pending() + STREAM) + STREAM, 2 * ROWS + 2 * STREAM, 1),
        (lambda: (pending() + STREAM) + BIAS, 2 * ROWS + STREAM + BIAS, 1),
        (lambda: pending() + jnp.ones((2, 1)), 2 * ROWS + 1, 1),
        (lambda: STREAM + (pending() + pending() + BIAS) * 0.5, 2 * ROWS + 0.5 * BIAS + STREAM, 1),
        (lambda: (pending() + STREAM) * 0.5 + STREAM, ROWS + 1.5 * STREAM, 1),
    ],
)
def test_whatever_is_added_counts_once(sums, added, expected, count):
    np.testing.assert_array_equal(total(added()), expected)
    assert len(sums) == count


def test_a_sum_that_was_needed_is_not_computed_again_for_the_next_one(sums):
    x = STREAM + pending()
    norm = RMSNorm(2, 1e-5, "norm", dtype=jnp.float32, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x), norm(STREAM + 2 * ROWS))
    np.testing.assert_array_equal(total(x + pending()), STREAM + 4 * ROWS)
    assert [term is ROWS for term in sums] == [True, True]
    y = pending()
    np.testing.assert_array_equal(total(y), 2 * ROWS)
    np.testing.assert_array_equal(total(STREAM + y), STREAM + 2 * ROWS)
    assert len(sums) == 3


def test_a_norm_takes_the_sum_from_its_kernel(sums, monkeypatch):
    given = []

    def psum_norm(x, stream, bias, factors, *, eps):
        given.append((x, stream, bias, factors, eps))
        return STREAM * 3, STREAM * 4

    monkeypatch.setattr(collectives, "psum_norm", psum_norm)
    norm = RMSNorm(2, 1e-5, "norm", dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = STREAM + (pending() + BIAS)
    np.testing.assert_array_equal(norm(x), STREAM * 4)
    np.testing.assert_array_equal(total(x), STREAM * 3)
    np.testing.assert_array_equal(norm(x), norm(STREAM * 3))
    assert sums == []
    ((part, stream, bias, factors, eps),) = given
    assert (part is ROWS, stream is STREAM, bias is BIAS, eps) == (True, True, True, 1e-5)
    np.testing.assert_array_equal(factors, norm.scale[...])
    assert isinstance(norm(pending()), jax.Array)  # no stream: the norm of a sum alone has no kernel
    assert len(given) == 1


def test_what_a_kernel_norms_is_added_with_its_norm(monkeypatch):
    """On one device in exact mode, which needs a GPU: here the reference stands for the kernel."""
    monkeypatch.setattr(sharding, "is_exact", lambda: True)
    norm = RMSNorm(2, 1e-5, "norm", dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    added = later_add(later_add(STREAM, ROWS), ROWS)
    assert isinstance(added, PendingSum)
    expected = STREAM + ROWS + ROWS
    np.testing.assert_array_equal(norm(added), norm(expected))
    np.testing.assert_array_equal(total(added), expected)
    monkeypatch.setattr(sharding, "is_exact", lambda: False)
    np.testing.assert_array_equal(later_add(STREAM, ROWS), STREAM + ROWS)
