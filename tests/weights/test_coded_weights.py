"""Matrices that stay in their codes in a bfloat16 network are the dense ones, and are cut where those are."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden_files import QUANTIZED, quantized_folder
from jax.sharding import AbstractMesh
from jaxspec_kernels.expert_matmul import expert_matmul
from jaxspec_kernels.op import recorded
from jaxspec_kernels.packed_matmul import CodedWeight, pack_codes
from jaxspec_kernels.packed_matmul.coded_product import FEW_FP8_ROWS

from jaxspec.config import ModelConfig
from jaxspec.files import open_checkpoint
from jaxspec.files.quantized.codes import Codes, QuantizedTensor
from jaxspec.models.layers.transformer import MLP
from jaxspec.models.target import load_target, plan_target
from jaxspec.weights import loading
from jaxspec.weights.coded_weights import coded_experts, coded_sharding, coded_weight
from jaxspec.weights.expert_sources import tensor_per_expert
from jaxspec.weights.loading import declared
from jaxspec.weights.parameters import Fused, Projection

pytestmark = pytest.mark.filterwarnings("ignore:.*no kernel reads them as they are stored")

PACKED = {
    "fp8-blocks": 4,
    "fp8-channel": 4,
    "fp8-tensor": 4,
    "int8-channel": 4,
    # Kernels read whole blocks of 128 inputs: only `down_proj` has them.
    **dict.fromkeys(
        ("awq", "gptq", "gptq-act-order", "gptq-v2", "int4-channel", "int4-groups", "int4-zero-points"), 1
    ),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_bfloat16_network_keeps_codes_and_means_the_same(case):
    checkpoint = open_checkpoint(quantized_folder(case))
    packed = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16)).read(packed=True, codes=True)
    dense = load_target(checkpoint, dtype=jnp.float32)
    found = 0
    for (one, source), (other, _) in zip(declared(packed), declared(dense), strict=True):
        weight = one.get_value()
        expected = np.asarray(other.get_value())
        if isinstance(weight, CodedWeight):
            found += 1
            assert "_proj" in source.tensors[0][0]
            np.testing.assert_array_equal(np.asarray(weight), expected)
        else:
            np.testing.assert_array_equal(weight, expected.astype(ml_dtypes.bfloat16))
    assert found == PACKED.get(case, 0)


def test_codes_are_dequantized_unless_they_are_asked_for():
    checkpoint = open_checkpoint(quantized_folder("fp8-blocks"))
    plain = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16)).read(packed=True)
    assert not any(isinstance(variable.get_value(), CodedWeight) for variable, _ in declared(plain))


@pytest.mark.parametrize("rows", [1, 19])
def test_logits_are_those_of_the_dense_weights(rows):
    checkpoint = open_checkpoint(quantized_folder("fp8-blocks"))
    packed = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16)).read(packed=True, codes=True)
    dense = load_target(checkpoint, dtype=jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 64)), jnp.bfloat16)
    one, other = (jax.jit(lambda x, mlp=model.layers[0].mlp: mlp(x))(x) for model in (packed, dense))
    np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.1, atol=0.2)


class Stored(QuantizedTensor):
    """A matrix of FP8 in blocks."""

    kind = "FP8"

    def read_codes(self):
        rng = np.random.default_rng(self.shape[0])
        rows, columns = (-(-n // each) for n, each in zip(self.shape, self.block, strict=True))
        codes = rng.integers(0, 120, self.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        return Codes(codes, rng.uniform(1, 2, (rows, columns)).astype(np.float32), self.block)


@pytest.mark.parametrize(
    ("sizes", "head", "block", "scale_rows"),
    [
        ((64, 32, 32), 16, (16, 128), 16),
        ((64, 32, 32), 16, (32, 128), 1),  # a scale is for two heads, which are not neighbours here
        ((64, 32, 32), 16, (12, 128), 4),  # blocks are cut off, so that four rows share a scale everywhere
        ((64, 32, 32), 16, (1, 256), 1),
    ],
)
def test_heads_of_fused_matrices_share_scales_where_they_can(sizes, head, block, scale_rows):
    parts = tuple(
        Projection(f"{name}.weight", (256,), (2, size // head // 2, head))
        for name, size in zip("qkv", sizes, strict=True)
    )
    source, shape = Fused(parts, -2), (256, 2, 4, head)
    stored = [Stored((size, 256), block) for size in sizes]
    weight = coded_weight(source, shape, stored)
    assert (weight.shape, weight.scale_rows) == (shape, scale_rows)
    expected = source.join([tensor.read() for tensor in stored])
    np.testing.assert_array_equal(np.asarray(weight), expected)


def test_a_code_of_nan_or_an_infinite_scale_makes_a_matrix_dense():
    class Other(Stored):
        def read_codes(self):
            codes = super().read_codes()
            codes.values.view(np.uint8)[3, 5] = 0xFF
            return codes

    class Infinite(Stored):
        def read_codes(self):
            codes = super().read_codes()
            codes.scale[0, 0] = np.inf
            return codes

    source = Projection("x.weight", (256,), (64,))
    assert coded_weight(source, (256, 64), [Stored((64, 256), (16, 128))]) is not None
    for kind in (Other, Infinite):
        assert coded_weight(source, (256, 64), [kind((64, 256), (16, 128))]) is None


@pytest.mark.parametrize(
    ("axes", "group", "cut", "scales"),
    [
        (("embed", None, "feed_forward"), 128, (2, 1, 4, 64, 128), (4, 2, 64)),
        (("feed_forward", None, "embed"), 128, (2, 2, 2, 64, 128), (2, 2, 128)),
        (("feed_forward", None, "embed"), 512, (2, 128, 2, 1, 128), (1, 2, 128)),
        (None, 128, (2, 2, 4, 64, 128), (4, 2, 128)),
    ],
)
def test_codes_are_cut_where_the_weights_are(axes, group, cut, scales):
    codes = np.zeros((256, 512), ml_dtypes.float8_e4m3fn)
    weight = pack_codes(codes, np.ones((256, 512 // group), np.float32), None, (2, 128))
    places = coded_sharding(weight, AbstractMesh((2,), ("tensor",)), axes)
    assert places.codes.shard_shape(weight.codes.shape) == cut
    assert places.scale.shard_shape(weight.scale.shape) == scales


def test_a_part_that_would_cut_a_block_is_dense():
    weight = pack_codes(
        np.zeros((64, 384), ml_dtypes.float8_e4m3fn), np.ones((64, 3), np.float32), None, (64,)
    )
    mesh = AbstractMesh((2,), ("tensor",))
    assert coded_sharding(weight, mesh, ("feed_forward", "embed")) is None
    shared = pack_codes(
        np.zeros((128, 256), ml_dtypes.float8_e4m3fn), np.ones((1, 2), np.float32), None, (128,)
    )
    assert coded_sharding(shared, mesh, ("embed", "feed_forward")) is None


class Integers(Stored):
    """A matrix of four bits in groups of 128, all of whose zero points are `zero`."""

    kind, zero = "INT4", 8

    def read_codes(self):
        rng = np.random.default_rng(self.shape[0] + self.zero)
        scale = rng.uniform(1, 2, (self.shape[0], self.shape[1] // 128)).astype(np.float16)
        codes = rng.integers(0, 16, self.shape, np.uint8)
        return Codes(codes, scale, (1, 128), np.full(scale.shape, self.zero, np.uint8))


class Nines(Integers):
    zero = 9


def experts(kinds, block=(16, 128)):
    """Gate and up projections of two experts, [2, 256, 2, 128], from tensors of these kinds."""
    source = tensor_per_expert("x", 2, 256, 128).gate_up
    stored = [kind((128, 256), block) for kind in kinds]
    return source, coded_experts(source, (2, 256, 2, 128), stored), [tensor.read() for tensor in stored]


@pytest.mark.parametrize("kinds", [(Stored,) * 4, (Integers,) * 4, (Integers, Integers, Nines, Integers)])
def test_experts_keep_their_codes(kinds):
    source, weights, tensors = experts(kinds)
    assert (weights.shape, weights.bits) == ((2, 256, 2, 128), 8 if kinds[0] is Stored else 4)
    np.testing.assert_array_equal(np.asarray(weights), source.join(tensors))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), jnp.bfloat16)
    chosen = jnp.asarray([1, 0, 1])
    y = expert_matmul(x, chosen, jax.tree.map(jnp.asarray, weights))
    expected = np.einsum("am,amgf->agf", np.asarray(x, np.float64), source.join(tensors)[np.asarray(chosen)])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())


def test_experts_of_several_forms_are_dense():
    assert experts((Stored, Stored, Integers, Integers))[1] is None
    assert coded_experts(Projection("x", (256,), (64,)), (256, 64), []) is None


@pytest.mark.parametrize(
    ("axes", "codes", "scales"),
    [
        (("experts", "embed", None, "expert_inner"), (2, 2, 1, 2, 64, 128), (2, 2, 2, 4)),
        (("experts", None, None, None), (1, 2, 2, 2, 64, 128), (1, 2, 2, 8)),
    ],
)
def test_experts_are_cut_where_the_weights_are(axes, codes, scales):
    _, weights, _ = experts((Stored,) * 4)
    places = coded_sharding(weights, AbstractMesh((2,), ("tensor",)), axes)
    assert places.codes.shard_shape(weights.codes.shape) == codes
    assert places.scale.shard_shape(weights.scale.shape) == scales


class Ordered(Integers):
    """Groups of 128 inputs that are not adjacent."""

    seed = 3

    def read_codes(self):
        group = np.random.default_rng(self.seed).permutation(np.arange(256) // 128)
        return replace(super().read_codes(), group=group)


class OtherOrder(Ordered):
    seed = 4


class UnequalGroups(Ordered):
    def read_codes(self):
        return replace(super().read_codes(), group=np.arange(256) // 100 % 2)


@pytest.mark.parametrize(
    "kinds", [(Ordered,) * 2, (Ordered, OtherOrder), (Ordered, Integers), (UnequalGroups,) * 2]
)
def test_an_order_of_inputs_that_fused_matrices_share_stays_packed(kinds):
    source = MLP.gate_up_source("x", "weight", (256,), 128)
    stored = [kind((128, 256), (1, 128)) for kind in kinds]
    weight = coded_weight(source, (256, 2, 128), stored)
    if set(kinds) != {Ordered}:
        assert weight is None
        return
    np.testing.assert_array_equal(np.asarray(weight), source.join([tensor.read() for tensor in stored]))
    mesh = AbstractMesh((2,), ("tensor",))
    assert coded_sharding(weight, mesh, ("embed", None, "feed_forward")).order.is_fully_replicated
    assert coded_sharding(weight, mesh, ("feed_forward", None, "embed")) is None


@pytest.mark.parametrize("activations", ["float32", "float8_e4m3fn"])
def test_output_rows_that_are_rounded_while_loading_stay_packed(activations):
    checkpoint = open_checkpoint(quantized_folder("fp8-blocks"))
    plan = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16), output_dtype="float8_e4m3fn")
    target = plan.read(packed=True, activations=activations)
    (packed,) = (
        each.get_value() for each, _ in declared(target) if isinstance(each.get_value(), CodedWeight)
    )
    assert isinstance(target.output_kernel, CodedWeight)
    np.testing.assert_array_equal(np.asarray(packed), np.asarray(target.output_kernel))
    assert target.output_kernel.activations is None
    every = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16)).read(
        packed=True, codes=True, activations=activations
    )
    attention, mlp = every.layers[0].attention, every.layers[0].mlp
    for weight in (attention.qkv, attention.output, mlp.gate_up, mlp.down.kernel):
        assert weight.get_value().activations == (None if activations == "float32" else activations)


class Weighed(MLP):
    def weigh(self, x, inner):
        return inner


class Curved(MLP):
    def activation(self, x):
        return jax.nn.silu(x)


@pytest.mark.parametrize("activations", ["float8_e4m3fn", None])
@pytest.mark.parametrize(("kind", "bias"), [(MLP, False), (MLP, True), (Weighed, False), (Curved, False)])
def test_a_plain_feed_forward_network_gates_its_rows_in_an_operation_with_products(kind, bias, activations):
    config = ModelConfig("llama", 40, 128, 256, 5, 2, 1, 8, mlp_bias=bias)
    mlp = kind(config, "mlp", dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for variable in (mlp.gate_up, mlp.down.kernel):
        width, *outputs = variable.shape
        codes = rng.integers(0, 255, (math.prod(outputs), width), np.uint8)
        codes[codes == 127] = 0
        scale = rng.uniform(0.5, 1, (math.prod(outputs), 1)).astype(np.float32) / 2048
        packed = pack_codes(codes.view(ml_dtypes.float8_e4m3fn), scale, None, tuple(outputs))
        variable.set_value(replace(jax.tree.map(jnp.asarray, packed), activations=activations))
    x = jnp.asarray(rng.standard_normal((FEW_FP8_ROWS + 1, 128)), jnp.bfloat16)

    with recorded() as results:
        y = jax.jit(lambda x: mlp(x))(x)
    is_plain = kind is MLP and not bias
    if activations is None:
        expected = ["gated_packed_matmul" if is_plain else "packed_matmul", "packed_matmul"]
    else:
        expected = ["gated_fp8_matmul"] if is_plain else ["fp8_matmul"] * 2
    assert [name for name, _ in results] == expected
    fused = np.asarray(x, np.float64) @ np.asarray(mlp.gate_up.get_value(), np.float64).reshape(128, 512)
    gate, up = np.split(fused, 2, axis=-1)
    exact = gate / (1 + np.exp(-gate)) * up @ np.asarray(mlp.down.kernel.get_value(), np.float64)
    bound = 0.01 if activations is None else 0.1
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < bound * np.linalg.norm(exact)


def test_what_devices_would_cut_is_named(monkeypatch):
    monkeypatch.setattr(loading, "packed_sharding", lambda *_: None)
    plan = plan_target(open_checkpoint(quantized_folder("fp8-blocks")), dtype=jnp.dtype(jnp.bfloat16))
    named = r"cut their blocks: .*model\.layers\.\*\.mlp\.down_proj\.weight \(1\)"
    with pytest.warns(UserWarning, match=named):
        target = plan.read(packed=True, codes=True)
    assert not any(isinstance(each.get_value(), CodedWeight) for each, _ in declared(target))
