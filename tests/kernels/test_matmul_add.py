import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.matmul_add import matmul_add
from jaxspec_kernels.matmul_add.cases import CASES

OP = matmul_add
BOUND = {"float32": 1e-6, "bfloat16": 8e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case, implementation):
    if implementation == "xla" and case.width * case.outputs > 1 << 22:
        pytest.skip("large weights are for a GPU")
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    kernel = rng.standard_normal((case.width, case.outputs), np.float32) * case.width**-0.5
    x, residual = rng.normal(size=(case.rows, case.width)), rng.normal(size=(case.rows, case.outputs))
    x, kernel, residual = given = [jnp.asarray(a, dtype) for a in (x, kernel, residual)]
    y = jax.jit(lambda *args: OP(*args, implementation=implementation))(*given)
    wide = [np.asarray(a, np.float64) for a in given]
    expected = wide[2] + wide[0] @ wide[1]
    assert y.dtype == dtype
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < BOUND[case.dtype]


def test_keeps_leading_axes(implementation):
    x, kernel = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    residual = jnp.ones((2, 3, 32), jnp.bfloat16)
    assert OP(x, kernel, residual, implementation=implementation).shape == (2, 3, 32)
