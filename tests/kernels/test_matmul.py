import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.matmul import CASES
from jaxspec_kernels.matmul import matmul

OP = matmul
BOUND = {"float32": 1e-6, "bfloat16": 8e-3}
on_a_cpu = pytest.mark.skipif(OP.why_not("numba") is not None, reason=f"{OP.why_not('numba')}")


def operands(rows, width, outputs, dtype="float32"):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width), np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((width, outputs), np.float32), dtype)


# Packed weights: test_packed_weight.py.
@pytest.mark.parametrize("case", [c for c in CASES if not c.packed], ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case, implementation):
    x, kernel = operands(case.rows, case.width, case.outputs, case.dtype)
    y = jax.jit(lambda *args: OP(*args, implementation=implementation))(x, kernel)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert y.dtype == x.dtype
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < BOUND[case.dtype]


def test_keeps_the_axes_of_both(implementation):
    x, kernel = jnp.ones((2, 1, 576)), jnp.ones((576, 3, 2, 160))
    y = OP(x, kernel, implementation=implementation)
    assert y.shape == (2, 1, 3, 2, 160)
    assert (np.asarray(y) == 576).all()


@on_a_cpu
def test_a_row_does_not_depend_on_how_many_run_beside_it():
    x, kernel = operands(8, 576, 1000)
    all_rows = np.asarray(OP(x, kernel, implementation="numba"))
    for rows in (1, 3, 5):
        np.testing.assert_array_equal(OP(x[:rows], kernel, implementation="numba"), all_rows[:rows])


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
