import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.rms_matmul import rms_matmul
from jaxspec_kernels.rms_matmul.cases import CASES

OP = rms_matmul
BOUND = {"float32": 1e-6, "bfloat16": 8e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case, implementation):
    if implementation == "xla" and case.width * case.outputs > 1 << 22:
        pytest.skip("large weights are for a GPU")
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    shape = (case.width, 2, case.outputs) if case.gated else (case.width, case.outputs)
    x, scale = rng.normal(size=(case.rows, case.width)), rng.normal(size=case.width)
    kernel = rng.standard_normal(shape, np.float32) * case.width**-0.5
    x, scale, kernel = (jnp.asarray(a, dtype) for a in (3 * x, scale, kernel))
    y = jax.jit(lambda *args: OP(*args, eps=1e-5, gated=case.gated, implementation=implementation))(
        x, scale, kernel
    )
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
    expected = np.einsum("rm,m...->r...", wide, np.asarray(kernel, np.float64))
    if case.gated:
        gate, up = expected[:, 0], expected[:, 1]
        expected = gate / (1 + np.exp(-gate)) * up
    assert y.dtype == dtype
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < BOUND[case.dtype]


def test_keeps_leading_and_output_axes(implementation):
    x, kernel = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.ones((64, 4, 5), jnp.bfloat16)
    scale = jnp.ones(64, jnp.bfloat16)
    assert OP(x, scale, kernel, eps=1e-5, implementation=implementation).shape == (2, 3, 4, 5)
    gated = jnp.ones((64, 2, 5), jnp.bfloat16)
    assert OP(x, scale, gated, eps=1e-5, gated=True, implementation=implementation).shape == (2, 3, 5)
