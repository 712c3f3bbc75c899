"""The choice of experts, against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.choose_experts import CASES
from jaxspec_kernels.choose_experts import choose_experts
from op_base import OpTest

OP = choose_experts


class TestChooseExperts(OpTest):
    op = OP
    cases = CASES
    usual = ("odd sizes", "odd sizes, over all", "ties")
    bound = 1e-6
    by_row = (0,)
    exact = ("triton",)

    def arguments(self, case):
        rng = np.random.default_rng(0)
        size = (case.rows, case.experts)
        scores = rng.integers(-1, 2, size) if case.ties else 3 * rng.standard_normal(size)
        return (jnp.asarray(scores, jnp.float32),)

    def options(self, case):
        return {"keep": case.keep, "softmax": case.softmax}

    def definition(self, case, scores):
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : case.keep].astype(np.int32)
        weights = np.take_along_axis(scores.astype(np.float64), chosen, axis=1)
        if case.softmax:
            summed = weights if case.softmax == "chosen" else scores.astype(np.float64)
            weights = np.exp(weights) / np.exp(summed).sum(axis=1, keepdims=True)
        return weights, chosen


def test_scores_without_a_bound_are_ordered(implementation):
    scores = jnp.asarray([[-np.inf, 1, np.inf, -2, 0], [-np.inf] * 5], jnp.float32)
    weights, chosen = OP(scores, keep=5, implementation=implementation)
    np.testing.assert_array_equal(chosen, [[2, 1, 4, 3, 0], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(weights, [[np.inf, 1, 0, -2, -np.inf], [-np.inf] * 5])
