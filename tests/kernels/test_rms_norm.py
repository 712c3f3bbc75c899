from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.rms_norm import add_rms_norm, rms_norm
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

    def test_in_16_bits_the_norm_is_rounded_before_its_product_with_the_factors(self, implementation):
        x, factors = (array.astype(jnp.bfloat16) for array in self.arguments(self.cases[3]))
        wide = np.asarray(x, np.float64)
        normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
        rounded = jnp.asarray(normed, jnp.bfloat16)
        result = self.op(x, factors, 1e-5, implementation=implementation)
        assert result.dtype == jnp.bfloat16
        assert (np.asarray(result == rounded * factors)).mean() > 0.98  # others are near a tie

    def test_gradients_may_be_mapped_over_rows(self, implementation):
        x, factors = self.arguments(self.cases[1])

        def gradient(x, name):
            return jax.grad(lambda x: (self.op(x, factors, 1e-5, implementation=name) ** 3).sum())(x)

        of_a_row = jax.jit(jax.vmap(partial(gradient, name=implementation)))
        np.testing.assert_allclose(of_a_row(x), gradient(x, "xla"), rtol=1e-5, atol=1e-5)


class AddCase(NamedTuple):
    name: str
    rows: int
    width: int
    has_bias: bool


class TestAddRmsNorm(OpTest):
    op = add_rms_norm
    cases = (AddCase("one", 1, 1, False), AddCase("bias", 5, 64, True), AddCase("wide", 9, 576, False))
    usual = ("bias", "wide")
    bound = 3e-7
    by_row = (0, 1)
    exact = ("xla",)

    def arguments(self, case):
        rng = np.random.default_rng(case.width)
        x, stream = (jnp.asarray(rng.standard_normal((case.rows, case.width)), jnp.float32) for _ in range(2))
        bias, factors = (jnp.asarray(rng.standard_normal(case.width), jnp.float32) for _ in range(2))
        return x, stream, bias if case.has_bias else None, factors

    def options(self, case):
        return {"eps": 1e-5}

    def definition(self, case, x, stream, bias, factors):
        total = np.asarray(x, np.float64) + np.asarray(stream) + (0 if bias is None else np.asarray(bias))
        return total, total / np.sqrt((total**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(factors)
