from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.row_sum import row_sum, sum_in_order
from op_base import OpTest


class Case(NamedTuple):
    name: str
    shape: tuple[int, ...]


class TestRowSum(OpTest):
    op = row_sum
    cases = tuple(Case(str(shape), shape) for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 9000), (2, 49152)))
    usual = ("(3, 7)", "(4, 9000)")
    bound = 2e-6
    by_row = (0,)
    exact = ("triton", "numba")

    def arguments(self, case):
        rng = np.random.default_rng(case.shape[-1])
        return (jnp.asarray(rng.uniform(0, 1, case.shape), jnp.float32),)

    def definition(self, case, x):
        return np.asarray(x, np.float64).sum(axis=-1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_order_of_a_short_sum_is_that_of_the_axis(axis):
    x = np.random.default_rng(0).standard_normal((3, 4, 5), np.float32)
    one_by_one = np.take(x, [0], axis)
    for i in range(1, x.shape[axis]):
        one_by_one = one_by_one + np.take(x, [i], axis)
    np.testing.assert_array_equal(sum_in_order(jnp.asarray(x), axis), one_by_one)
