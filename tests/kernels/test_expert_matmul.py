import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.expert_matmul import CASES
from jaxspec_kernels.expert_matmul import (
    Mxfp4Weight,
    PackedExperts,
    expert_matmul,
    pack_mxfp4,
    reads_each_expert_once,
)
from jaxspec_kernels.matmul import PackedWeight
from packed_weights import OUTPUTS, WIDTH, experts

OP = expert_matmul
BOUND = {"float32": 1e-6, "bfloat16": 1e-5}


def random_weights(case, rng):
    size = (case.experts, case.width, case.outputs)
    if not case.packed:
        return jnp.asarray(rng.standard_normal(size, np.float32), case.dtype)
    values = rng.integers(0, 256, (case.experts, case.width // 2, case.outputs), np.uint8)
    scale = rng.integers(115, 129, (case.experts, case.width // 32, case.outputs), np.uint8)
    return jax.tree.map(jnp.asarray, pack_mxfp4(values, scale))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case, implementation):
    if implementation != "triton" and case.experts * case.width * case.outputs > 1 << 22:
        pytest.skip("large weights are for a GPU")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((case.rows, case.width), np.float32), case.dtype)
    weights = random_weights(case, rng)
    chosen = rng.integers(0, case.spread, case.rows) + case.experts - case.spread
    y = jax.jit(lambda *args: OP(*args, implementation=implementation))(x, jnp.asarray(chosen), weights)
    wide, experts = np.asarray(x, np.float64), np.asarray(weights)
    expected = np.empty((case.rows, case.outputs))
    for e in np.unique(chosen):
        expected[chosen == e] = wide[chosen == e] @ experts[e].astype(np.float64)
    assert y.dtype == jnp.float32
    assert np.linalg.norm(y - expected) <= BOUND[case.dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize("packed", [False, True])
def test_keeps_the_axes_of_the_weight(implementation, packed):
    x, weights = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((4, 64, 2, 16), jnp.bfloat16)
    if packed:
        ones, scale = np.full((4, 32, 2, 16), 0x22, np.uint8), np.full((4, 2, 2, 16), 127, np.uint8)
        weights = jax.tree.map(jnp.asarray, pack_mxfp4(ones, scale))
    y = OP(x, jnp.asarray([3, 0, 3], jnp.int32), weights, implementation=implementation)
    assert y.shape == (3, 2, 16)
    assert (np.asarray(y) == 64).all()


@pytest.mark.parametrize(("form", "activations"), [("MXFP4", "int8"), ("Q4_1", "float32")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_packed_for_a_cpu(implementation, form, activations, dtype):
    weights, values = experts(form, activations)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, WIDTH), np.float32), dtype)
    chosen = jnp.asarray([2, 0, 2, 2, 1, 0], jnp.int32)
    y = jax.jit(lambda *args: OP(*args, implementation=implementation))(x, chosen, weights)
    assert y.shape == (6, 2, OUTPUTS // 2)
    assert y.dtype == jnp.float32
    expected = np.stack([row @ values[e] for row, e in zip(np.asarray(x, np.float64), chosen, strict=True)])
    error = np.linalg.norm(y.reshape(6, OUTPUTS) - expected) / np.linalg.norm(expected)
    assert error < (1e-2 if activations == "int8" else 1e-6)


DENSE = jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16)
ON_CPU = PackedExperts(PackedWeight(DENSE, None, None, (64, 128)), (4, 64, 32))
PACKED = Mxfp4Weight(
    jax.ShapeDtypeStruct((4, 32, 16), jnp.uint16), jax.ShapeDtypeStruct((4, 2, 32), jnp.uint8)
)


@pytest.mark.parametrize(
    ("dtype", "weights", "once"),
    [
        (jnp.bfloat16, DENSE, True),
        (jnp.bfloat16, PACKED, True),
        (jnp.float32, DENSE, False),
        (jnp.float32, PACKED, False),
        (jnp.float32, ON_CPU, True),
        (jnp.bfloat16, ON_CPU, False),
    ],
)
def test_what_the_kernel_is_not_for_copies_experts(monkeypatch, dtype, weights, once):
    monkeypatch.setattr(OP, "why_not", lambda _: None)
    assert reads_each_expert_once(dtype, weights) == once
    monkeypatch.setattr(OP, "why_not", lambda _: "cannot run")
    assert not reads_each_expert_once(dtype, weights)
