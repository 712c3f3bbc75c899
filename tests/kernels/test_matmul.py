import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.matmul import CASES
from jaxspec_kernels.matmul import matmul
from op_base import OpTest

BOUND = {"float32": 1e-6, "bfloat16": 8e-3}
OP = matmul
on_a_cpu = pytest.mark.skipif(OP.why_not("numba") is not None, reason=f"{OP.why_not('numba')}")


def operands(rows, width, outputs, dtype="float32"):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width), np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((width, outputs), np.float32), dtype)


class TestMatmul(OpTest):
    """Packed weights: test_packed_weight.py."""

    op = matmul
    cases = tuple(case for case in CASES if not case.packed)
    usual = ("odd sizes", "eight rows")
    bound = BOUND
    by_row = (0,)

    def arguments(self, case):
        return operands(case.rows, case.width, case.outputs, case.dtype)

    def definition(self, case, x, kernel):
        return np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)


def test_keeps_the_axes_of_both(implementation):
    x, kernel = jnp.ones((2, 1, 576)), jnp.ones((576, 3, 2, 160))
    y = OP(x, kernel, implementation=implementation)
    assert y.shape == (2, 1, 3, 2, 160)
    assert (np.asarray(y) == 576).all()


@on_a_cpu
def test_works_in_a_loop_and_from_several_threads_at_once():
    x, kernel = operands(5, 1024, 1024)
    kernel = kernel / 32

    @jax.jit
    def powers(x):
        return jax.lax.fori_loop(0, 20, lambda _, x: OP(x, kernel, implementation="numba"), x)

    expected = np.asarray(powers(x))
    results = [None] * 4

    def work(i):
        results[i] = np.asarray(powers(x))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for result in results:
        np.testing.assert_array_equal(result, expected)
