import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.expert_matmul import expert_matmul, reads_each_expert_once
from jaxspec_kernels.expert_matmul.cases import CASES

OP = expert_matmul
BOUND = {"float32": 1e-6, "bfloat16": 1e-5}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case, implementation):
    if implementation == "xla" and case.experts * case.width * case.outputs > 1 << 22:
        pytest.skip("large weights are for a GPU")
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    x = jnp.asarray(rng.standard_normal((case.rows, case.width), np.float32), dtype)
    size = (case.experts, case.width, case.outputs)
    weights = jnp.asarray(rng.standard_normal(size, np.float32), dtype)
    chosen = jnp.asarray(rng.integers(0, case.spread, case.rows) + case.experts - case.spread, jnp.int32)
    y = jax.jit(lambda *args: OP(*args, implementation=implementation))(x, chosen, weights)
    wide, experts = np.asarray(x, np.float64), np.asarray(weights)
    expected = np.stack([row @ experts[e].astype(np.float64) for row, e in zip(wide, chosen, strict=True)])
    assert y.dtype == jnp.float32
    assert np.linalg.norm(y - expected) <= BOUND[case.dtype] * np.linalg.norm(expected)


def test_keeps_the_axes_of_the_weight(implementation):
    x, weights = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((4, 64, 2, 16), jnp.bfloat16)
    y = OP(x, jnp.asarray([3, 0, 3], jnp.int32), weights, implementation=implementation)
    assert y.shape == (3, 2, 16)
    assert (np.asarray(y) == 64).all()


@pytest.mark.parametrize(
    ("rows", "dtype", "once"),
    [(128, jnp.bfloat16, True), (129, jnp.bfloat16, False), (4, jnp.float32, False)],
)
def test_what_the_kernel_is_not_for_copies_experts(monkeypatch, rows, dtype, once):
    monkeypatch.setattr(OP, "why_not", lambda _: None)
    assert reads_each_expert_once(rows, dtype) == once
    monkeypatch.setattr(OP, "why_not", lambda _: "cannot run")
    assert not reads_each_expert_once(rows, dtype)
