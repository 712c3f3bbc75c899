from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.expert_matmul import CASES, GATED
from bench.random_codes import random_coded_experts
from jaxspec_kernels.expert_matmul import (
    Mxfp4Weight,
    PackedExperts,
    expert_matmul,
    gated_expert_matmul,
    gates_experts,
    pack_mxfp4,
    reads_each_expert_once,
)
from jaxspec_kernels.matmul import PackedWeight
from op_base import OpTest
from packed_weights import WIDTH, experts, rounded

BOUND = {"float32": 1e-6, "bfloat16": 1e-5}
OP = expert_matmul


class ExpertsTest(OpTest):
    op = expert_matmul
    by_row = (0, 1)

    def dtype(self, case):
        return jnp.float32

    def definition(self, case, x, chosen, weights):
        wide, experts = np.repeat(np.float64(x), len(chosen) // len(x), axis=0), np.asarray(weights)
        results = np.empty((len(chosen), *experts.shape[2:]))
        for e in np.unique(chosen):
            results[chosen == e] = np.tensordot(wide[chosen == e], experts[e].astype(np.float64), 1)
        return results


class TestExpertMatmul(ExpertsTest):
    cases = CASES
    usual = ("odd sizes", "odd sizes, packed", "float32")
    bound = BOUND
    exact = ()  # for these weights only GPUs have kernels

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.experts * case.width * case.outputs <= 1 << 22

    def arguments(self, case, *out_axes):
        rng = np.random.default_rng(0)
        inputs = rng.standard_normal((case.rows // case.per_input, case.width), np.float32)
        x = jnp.asarray(inputs, case.dtype)
        outputs = out_axes or (case.outputs,)
        size = (case.experts, case.width, *outputs)
        if case.packed:
            values = rng.integers(0, 256, (case.experts, case.width // 2, *outputs), np.uint8)
            scale = rng.integers(115, 129, (case.experts, case.width // 32, *outputs), np.uint8)
            weights = jax.tree.map(jnp.asarray, pack_mxfp4(values, scale))
        elif case.bits:
            weights = random_coded_experts(jax.random.key(0), size, case.bits)
        else:
            weights = jnp.asarray(rng.standard_normal(size, np.float32), case.dtype)
        chosen = rng.integers(0, case.spread, case.rows) + case.experts - case.spread
        return x, jnp.asarray(chosen, jnp.int32), weights


class TestGatedExpertMatmul(TestExpertMatmul):
    op = gated_expert_matmul
    cases = GATED
    usual = ("odd sizes", "some rows, INT4", "float32")
    bound: ClassVar = {"float32": 1e-6, "bfloat16": 3e-3}  # the result is rounded

    def dtype(self, case):
        return jnp.dtype(case.dtype)

    def arguments(self, case):
        x, chosen, weights = super().arguments(case, 2, case.outputs // 2)
        # Gates that are neither all 0 nor all linear.
        return x if case.bits else x * case.width**-0.5, chosen, weights

    def definition(self, case, x, chosen, gate_up):
        gate, up = np.moveaxis(super().definition(case, x, chosen, gate_up), 1, 0)
        return gate / (1 + np.exp(-gate)) * up


class Packed(NamedTuple):
    """Experts packed for a CPU."""

    form: str
    activations: str
    dtype: str
    per_input: int = 1

    @property
    def name(self):
        return ", ".join(self[:3]) + ", shared inputs" * (self.per_input > 1)


class TestExpertsPackedForACpu(ExpertsTest):
    @staticmethod
    def is_for(case, implementation):
        return expert_matmul.why_not("numba") is None

    cases = (
        Packed("MXFP4", "int8", "float32"),
        Packed("MXFP4", "float32", "float32"),
        Packed("Q4_1", "int8", "float32"),
        Packed("Q4_1", "int8", "float32", per_input=2),
        Packed("Q4_1", "float32", "float32"),
        Packed("Q4_1", "float32", "bfloat16"),
        Packed("Q6_K", "int8", "float32"),
        Packed("bfloat16", "float32", "float32"),
    )
    usual = ("MXFP4, int8, float32", "Q4_1, float32, float32")
    bound = 1e-6

    def arguments(self, case):
        x = np.random.default_rng(1).standard_normal((6 // case.per_input, WIDTH), np.float32)
        chosen = jnp.asarray([2, 0, 2, 2, 1, 0], jnp.int32)
        return jnp.asarray(x, case.dtype), chosen, experts(case.form, case.activations)[0]

    def definition(self, case, x, chosen, weights):
        if case.activations == "int8":
            x = rounded(np.asarray(x, np.float32), weights.stack.row_block)
        return super().definition(case, x, chosen, weights)


@pytest.mark.parametrize("packed", [False, True])
def test_keeps_the_axes_of_the_weight(implementation, packed):
    x, weights = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((4, 64, 2, 16), jnp.bfloat16)
    if packed:
        ones, scale = np.full((4, 32, 2, 16), 0x22, np.uint8), np.full((4, 2, 2, 16), 127, np.uint8)
        weights = jax.tree.map(jnp.asarray, pack_mxfp4(ones, scale))
    y = OP(x, jnp.asarray([3, 0, 3], jnp.int32), weights, implementation=implementation)
    assert y.shape == (3, 2, 16)
    assert (np.asarray(y) == 64).all()


DENSE = jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16)
CODED = jax.eval_shape(lambda: random_coded_experts(jax.random.key(0), (4, 128, 2, 32), 4))
ON_CPU = PackedExperts(PackedWeight(DENSE, None, None, (64, 128)), (4, 64, 32))
PACKED = Mxfp4Weight(
    jax.ShapeDtypeStruct((4, 32, 16), jnp.uint16), jax.ShapeDtypeStruct((4, 2, 32), jnp.uint8)
)


@pytest.mark.parametrize(
    ("dtype", "weights", "once", "gated"),
    [
        (jnp.bfloat16, DENSE, True, False),
        (jnp.bfloat16, CODED, True, True),
        (jnp.float32, CODED, False, False),
        (jnp.bfloat16, PACKED, True, False),
        (jnp.float32, DENSE, False, False),
        (jnp.float32, PACKED, False, False),
        (jnp.float32, ON_CPU, True, False),
        (jnp.bfloat16, ON_CPU, False, False),
    ],
)
def test_what_the_kernels_are_not_for_copies_experts_and_is_gated_apart(
    monkeypatch, dtype, weights, once, gated
):
    for op in (OP, gated_expert_matmul):
        monkeypatch.setattr(op, "why_not", lambda _: None)
    assert reads_each_expert_once(dtype, weights) == once
    assert gates_experts(dtype, weights) == gated
    for op in (OP, gated_expert_matmul):
        monkeypatch.setattr(op, "why_not", lambda _: "cannot run")
    assert not reads_each_expert_once(dtype, weights)
    assert not gates_experts(dtype, weights)
