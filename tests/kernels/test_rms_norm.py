from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.rms_norm import rms_norm
from op_base import OpTest


class Case(NamedTuple):
    name: str
    shape: tuple[int, ...]


class TestRmsNorm(OpTest):
    op = rms_norm
    cases = tuple(Case(str(shape), shape) for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 576), (40, 576)))
    usual = ("(3, 7)", "(40, 576)")
    bound = 3e-7
    by_row = (0,)
    exact = ("xla", "numba")
    differentiable = (0, 1)

    def arguments(self, case):
        rng = np.random.default_rng(case.shape[-1])
        x, factors = (rng.standard_normal(size, np.float32) for size in (case.shape, case.shape[-1]))
        return jnp.asarray(x), jnp.asarray(factors)

    def options(self, case):
        return {"eps": 1e-5}

    def definition(self, case, x, factors):
        wide = np.asarray(x, np.float64)
        return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(factors)

    def test_gradients_may_be_mapped_over_rows(self, implementation):
        x, factors = self.arguments(self.cases[1])

        def gradient(x, name):
            return jax.grad(lambda x: (self.op(x, factors, 1e-5, implementation=name) ** 3).sum())(x)

        of_a_row = jax.jit(jax.vmap(partial(gradient, name=implementation)))
        np.testing.assert_allclose(of_a_row(x), gradient(x, "xla"), rtol=1e-5, atol=1e-5)
