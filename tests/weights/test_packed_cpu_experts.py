"""Experts that stay packed on a CPU are the experts that dense loading makes, in fewer bytes."""

import tracemalloc
from dataclasses import replace
from functools import cache

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from converted_gguf import write_converted
from golden_files import assert_close, golden_checkpoint, golden_folder, golden_outputs
from hlo_text import instructions
from jaxspec_kernels.expert_matmul import PackedExperts, expert_matmul
from optimised import optimised
from paged_rows import PagedTarget
from tiny_models import write_target

import jaxspec
from jaxspec.files import open_checkpoint
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor
from jaxspec.models.target import load_target, plan_target
from jaxspec.sampling import SamplingMode
from jaxspec.weights import packed_weights
from jaxspec.weights.loading import declared, export_tensors
from jaxspec.weights.packed_weights import packed_experts
from jaxspec.weights.parameters import Whole

pytestmark = pytest.mark.skipif(
    expert_matmul.why_not("numba") is not None, reason=f"{expert_matmul.why_not('numba')}"
)

FLOAT32 = jnp.dtype(jnp.float32)
CASE = "gpt-oss-mxfp4"
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)


@pytest.fixture(params=["safetensors", "gguf"])
def checkpoint(request, tmp_path):
    stored = golden_checkpoint(CASE)
    if request.param == "safetensors":
        return stored
    return open_checkpoint(write_converted(tmp_path / "tiny.gguf", stored))


def load(checkpoint, *, packed=True, activations="float32"):
    return plan_target(checkpoint, dtype=FLOAT32).read(packed=packed, activations=activations)


def experts(model):
    return {
        source.tensors[0][0]: variable.get_value()
        for variable, source in declared(model)
        if isinstance(variable.get_value(), PackedExperts)
    }


def assert_same_weights(packed, dense):
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_value()), np.asarray(other.get_value()), strict=True)


def test_mxfp4_stays_packed_and_means_the_same(checkpoint):
    packed, dense = load(checkpoint), load(checkpoint, packed=False)
    assert experts(dense) == {}
    assert len(experts(packed)) == 4
    for weight in experts(packed).values():
        assert weight.stack.form == "mxfp4"
        # Four bits a weight, and eight for 32; outputs are filled up to whole tiles of 32.
        count, width, *outputs = weight.shape
        padded = count * width * (-(-np.prod(outputs) // 32) * 32)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) == padded * 4.25 / 8
    assert_same_weights(packed, dense)
    exported = export_tensors(dense)
    for name, tensor in export_tensors(packed).items():
        np.testing.assert_array_equal(tensor, exported[name], strict=True)


@pytest.mark.parametrize(("activations", "relative"), [("float32", 1e-5), ("int8", 3e-2)])
def test_one_pass_equals_transformers(activations, relative):
    model, golden = load(golden_checkpoint(CASE), activations=activations), golden_outputs(CASE)
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=ids.shape[1]).feed(ids, [0, 0])
    assert_close(logits, golden["logits"], relative=relative)


def quantized(folder, kind, *, untrained=False):
    """A GGUF with experts of a kind in every layer; the last is zero if it is `untrained`."""
    stored = open_checkpoint(write_target(folder / "target", **QWEN))
    others = {}
    for i in range(stored.config["num_hidden_layers"]):
        for name in ("gate", "up", "down"):
            each = [
                stored.tensors[f"model.layers.{i}.mlp.experts.{j}.{name}_proj.weight"].read()
                for j in range(QWEN["num_experts"])
            ]
            each[-1] = each[-1] * (not untrained)
            blocks = gguf.quants.quantize(np.stack(each), gguf.GGMLQuantizationType[kind])
            others[f"blk.{i}.ffn_{name}_exps.weight"] = (blocks, kind)
    return write_converted(folder / "tiny.gguf", stored, others)


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_1", "uint8"), ("MXFP4", "mxfp4")])
def test_experts_with_tensors_of_their_own_stay_packed(tmp_path, kind, form):
    stored = open_checkpoint(quantized(tmp_path, kind))
    packed = load(stored)
    assert {weight.stack.form for weight in experts(packed).values()} == {form}
    assert len(experts(packed)) == 2 * packed.config.num_hidden_layers
    assert_same_weights(packed, load(stored, packed=False))


def test_an_expert_of_zeros_is_stored_as_the_others_are(tmp_path):
    """Its integers would fit into fewer bits."""
    packed = load(open_checkpoint(quantized(tmp_path, "Q8_0", untrained=True)))
    assert {weight.stack.form for weight in experts(packed).values()} == {"int8"}
    assert len(experts(packed)) == 2 * packed.config.num_hidden_layers


@pytest.mark.parametrize(
    ("kinds", "forms"),
    [
        (("Q8_0", "Q8_0", "Q8_0"), {"int8"}),
        (("Q4_1", "Q4_1", "Q5_0"), {"uint8", "int6"}),
        (("MXFP4", "Q8_0", "MXFP4"), {"int8", "mxfp4"}),
    ],
)
def test_experts_of_gpt_oss_in_other_formats_stay_packed(tmp_path, kinds, forms):
    """Of the file's gate, up and down projections; all experts of a layer are in one tensor each."""
    golden, others = golden_checkpoint(CASE), {}
    for i in range(golden.config["num_hidden_layers"]):
        gate_up, down = (
            golden.tensors[f"model.layers.{i}.mlp.experts.{name}_proj"].read().astype(np.float32)
            for name in ("gate_up", "down")
        )
        stacks = {"gate": gate_up[..., 0::2], "up": gate_up[..., 1::2], "down": down}
        for (name, stack), kind in zip(stacks.items(), kinds, strict=True):
            matrices = np.ascontiguousarray(stack.swapaxes(1, 2))
            blocks = gguf.quants.quantize(matrices, gguf.GGMLQuantizationType[kind])
            others[f"blk.{i}.ffn_{name}_exps.weight"] = (blocks, kind)
    stored = open_checkpoint(write_converted(tmp_path / "tiny.gguf", golden, others))
    packed = load(stored)
    assert {weight.stack.form for weight in experts(packed).values()} == forms
    assert len(experts(packed)) == 4
    assert_same_weights(packed, load(stored, packed=False))


def test_experts_in_bfloat16_stay_so():
    stored = golden_checkpoint("qwen3-moe")

    class Short:
        def __init__(self, tensor):
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, np.dtype(ml_dtypes.bfloat16)

        def read(self):
            return self.tensor.read().astype(self.dtype)

    tensors = {name: Short(t) if ".experts." in name else t for name, t in stored.tensors.items()}
    stored = replace(stored, tensors=tensors)
    packed = load(stored, activations="int8")
    assert {weight.stack.form for weight in experts(packed).values()} == {"bfloat16"}
    assert_same_weights(packed, load(stored, packed=False))
    model = load_target(stored, dtype=FLOAT32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32), np.float32))
    assert_close(packed.layers[0].mlp(x), np.asarray(model.layers[0].mlp(x)), relative=1e-5)


@cache
def loaded(activations):
    return load(golden_checkpoint(CASE), activations=activations)


@pytest.mark.parametrize("compiled", [jax.jit, optimised])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_a_row_does_not_depend_on_those_beside_it(activations, compiled):
    mlp = loaded(activations).layers[1].mlp
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 64), np.float32))
    run = compiled(lambda x: mlp(x))
    alone = np.concatenate([run(row[None]) for row in x])
    for count in (2, 9, 40):
        np.testing.assert_array_equal(run(x[:count]), alone[:count])


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_many_rows_read_experts_where_they_lie(activations):
    mlp = loaded(activations).layers[0].mlp
    text = jax.jit(lambda x: mlp(x)).lower(jnp.zeros((20, 64))).compile().as_text()
    assert sum("jaxspec_expert_matmul" in line for line in text.splitlines()) >= 2
    # No dequantized experts, neither all nor a copy for every row.
    assert [line for line, _, size in instructions(text) if "= f32[" in line and size >= 4 * 64 * 96] == []


def stored_with(change):
    """The golden with other scales of the down projections of layer 1."""
    stored, name = golden_checkpoint(CASE), "model.layers.1.mlp.experts.down_proj"
    tensor = stored.tensors[name]
    blocks, scales = change(tensor.blocks.read().copy(), tensor.scales.read().copy())

    class Array:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def read(self):
            return self.array

    changed = Mxfp4Tensor(Array(blocks), Array(scales))
    return replace(stored, tensors={**stored.tensors, name: changed}), name


@pytest.mark.parametrize("scale", [0, 1])
def test_blocks_of_zeros_have_any_scale(scale):
    def change(blocks, scales):
        blocks[2, 5, 1], scales[2, 5, 1] = 0x80, scale  # zeros of either sign
        return blocks, scales

    stored, name = stored_with(change)
    packed = load(stored)
    assert name in experts(packed)
    assert_same_weights(packed, load(stored, packed=False))


@pytest.mark.parametrize("scale", [0, 1, 129])
def test_scales_that_the_kernel_does_not_reach_make_a_tensor_dense(scale):
    def change(blocks, scales):
        blocks[2, 5, 1, 3], scales[2, 5, 1] = 0x10, scale
        return blocks, scales

    stored, name = stored_with(change)
    packed = load(stored)
    assert len(experts(packed)) == 3
    assert name not in experts(packed)
    x = jnp.ones((40, 64))
    expected = load(stored, packed=False).layers[1].mlp(x)
    assert_close(packed.layers[1].mlp(x), np.asarray(expected), relative=1e-5)


def test_loading_dequantizes_nothing():
    rng = np.random.default_rng(0)

    class Random:
        def __init__(self, *shape):
            self.array = rng.integers(100, 120, shape, np.uint8)
            self.shape, self.dtype = shape, self.array.dtype

        def read(self):
            return self.array

    tensor = Mxfp4Tensor(Random(16, 256, 8, 16), Random(16, 256, 8))
    tracemalloc.start()
    weight = packed_experts(Whole("experts", tensor.shape), tensor.shape, [tensor], activations="int8")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(weight))
    assert size <= peak < 2 * size


@pytest.mark.parametrize("drafter", [{"kind": "ngram", "num_speculative_tokens": 4}])
@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_drafts_change_no_token(activations, drafter):
    sizes = {"batch_size": 3, "page_size": 8, "prefill_chunk": 16, "sampling_modes": ("greedy",)}
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, *range(20, 40), 9], [40, 41]]

    def answers(**drafter):
        engine = jaxspec.load(
            golden_folder(CASE), drafter=drafter, cpu_activations=activations, progress=False, **sizes
        )
        # Neither in the weights nor in the program is an expert dequantized.
        assert sum(leaf.dtype == jnp.uint8 for leaf in engine.programs.leaves) == 8
        text = engine.programs.compiled_decode(mode=SamplingMode.GREEDY).as_text()
        assert "jaxspec_expert_matmul" in text
        generations = engine.generate(prompts, max_new_tokens=60, ignore_eos=True)
        return [one.token_ids for one in generations], [one.stats for one in generations]

    plain, _ = answers(kind="none")
    drafted, stats = answers(**drafter)
    assert drafted == plain
    rates = [rate for one in stats for rate in one.acceptance_per_position]
    assert max(rates) > 0
    assert min(rates) < 1


def test_a_weight_says_what_it_is_multiplied_with():
    for activations in ("float32", "int8"):
        weights = experts(loaded(activations)).values()
        assert {weight.stack.activations for weight in weights} == {activations}
