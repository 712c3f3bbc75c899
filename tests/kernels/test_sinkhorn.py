"""The Sinkhorn-Knopp algorithm, against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.sinkhorn import CASES
from jaxspec_kernels.sinkhorn import sinkhorn
from op_base import OpTest


class TestSinkhorn(OpTest):
    op = sinkhorn
    cases = CASES
    usual = ("odd",)
    bound = 2e-6
    by_row = (0,)
    exact = ("triton",)

    def arguments(self, case):
        scores = np.random.default_rng(0).normal(size=(case.rows, case.size, case.size), scale=3)
        return (jnp.asarray(scores, jnp.float32),)

    def options(self, case):
        return {"iterations": case.iterations, "eps": case.eps}

    def definition(self, case, scores):
        mix = np.exp(scores.astype(np.float64))
        mix = mix / mix.sum(2, keepdims=True) + case.eps
        for i in range(2 * case.iterations - 1):
            mix = mix / (mix.sum(1 + i % 2, keepdims=True) + case.eps)
        return mix
