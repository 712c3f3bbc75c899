"""Experts kept in MXFP4 are the experts that dense loading makes, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from full_size_run import assert_runs
from golden_files import assert_close, golden_checkpoint, golden_folder
from jaxspec_kernels.expert_matmul import Mxfp4Weight, expert_matmul
from jaxspec_kernels.matmul import matmul

import jaxspec
from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor
from jaxspec.models.target import make_target, plan_target
from jaxspec.weights.loading import ModulePlan, declared, export_tensors
from jaxspec.weights.packed_weights import keeps_packed

BFLOAT16 = jnp.dtype(jnp.bfloat16)
CHECKPOINT = golden_checkpoint("gpt-oss-mxfp4")


def load(*, packed, checkpoint=CHECKPOINT, dtype=BFLOAT16):
    return plan_target(checkpoint, dtype=dtype).read(packed=packed)


def packed_names(model):
    return [
        source.name.removeprefix("model.layers.").removesuffix("_proj")
        for variable, source in declared(model)
        if isinstance(variable.get_value(), Mxfp4Weight)
    ]


@pytest.fixture(scope="module")
def both():
    return load(packed=True), load(packed=False)


def test_both_projections_stay_packed_and_mean_the_same(both):
    packed, dense = both
    assert packed_names(dense) == []
    assert sorted(packed_names(packed)) == [
        f"{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("down", "gate_up")
    ]
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        expected = np.asarray(other.get_value())
        np.testing.assert_array_equal(np.asarray(one.get_value()), expected, strict=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_few_rows_and_many_give_the_same(both, rows):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 64)), BFLOAT16)
    packed, dense = (jax.jit(lambda x, mlp=model.layers[1].mlp: mlp(x))(x) for model in both)
    assert_close(packed.astype(jnp.float32), np.asarray(dense, np.float32), relative=1e-2)


def test_export_gives_back_the_dense_tensors(both):
    packed, dense = (export_tensors(model) for model in both)
    assert packed.keys() == dense.keys()
    for name, tensor in packed.items():
        np.testing.assert_array_equal(tensor, dense[name], strict=True)


def test_a_float32_network_dequantizes_its_experts():
    assert packed_names(load(packed=True, dtype=jnp.dtype(jnp.float32))) == []


def test_a_scale_that_the_kernel_does_not_reach_makes_a_tensor_dense():
    name = "model.layers.1.mlp.experts.down_proj"
    tensor = CHECKPOINT.tensors[name]
    scales = tensor.scales.read().copy()
    scales[1, 2, 0] = 129

    class Stored:
        shape, dtype = scales.shape, scales.dtype

        def read(self):
            return scales

    tensors = {**CHECKPOINT.tensors, name: Mxfp4Tensor(tensor.blocks, Stored())}
    model = load(packed=True, checkpoint=replace(CHECKPOINT, tensors=tensors))
    assert len(packed_names(model)) == 3
    np.testing.assert_array_equal(np.asarray(model.layers[1].mlp.down[...]), tensors[name].read())


@pytest.mark.parametrize(
    ("dtype", "op", "kernel"), [(jnp.float32, matmul, "numba"), (jnp.bfloat16, expert_matmul, "triton")]
)
def test_weights_stay_packed_where_a_kernel_takes_them(monkeypatch, dtype, op, kernel):
    monkeypatch.setattr(op, "why_not", {kernel: None}.__getitem__)
    assert keeps_packed(jnp.dtype(dtype))
    assert not keeps_packed(jnp.dtype(jnp.float16))
    monkeypatch.setattr(op, "why_not", {kernel: "cannot run"}.__getitem__)
    assert not keeps_packed(jnp.dtype(dtype))


def test_an_engine_gives_the_same_tokens_packed_and_dense(monkeypatch):
    read = ModulePlan.read

    def answer(packed):
        monkeypatch.setattr(ModulePlan, "read", lambda plan, mesh, **_: read(plan, mesh, packed=packed))
        engine = jaxspec.load(
            golden_folder("gpt-oss-mxfp4"),
            drafter={"kind": "ngram"},
            sampling_modes=("greedy",),
            progress=False,
            dtype="bfloat16",
            batch_size=1,
            page_size=8,
            prefill_chunk=16,
        )
        is_packed = any(leaf.dtype == jnp.uint16 for leaf in engine.programs.leaves)
        return is_packed, engine.generate([5, 6, 7, 8, 5, 6], max_new_tokens=20, ignore_eos=True).token_ids

    is_packed, tokens = answer(True)
    assert is_packed
    assert answer(False) == (False, tokens)


def test_full_size_shapes_run_packed():
    """Four layers, as all have the same experts."""
    config = json.loads((Path(__file__).parents[1] / "models/full_size/gpt-oss-20b.json").read_text("utf-8"))
    config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
    target = nnx.eval_shape(
        lambda: make_target(ModelConfig.from_hf(config), dtype=BFLOAT16, rngs=nnx.Rngs(0))
    )
    for layer in target.layers:
        for weight in (layer.mlp.gate_up, layer.mlp.down):
            count, width, *outputs = weight.get_value().shape
            words = jax.ShapeDtypeStruct((count, *outputs, width // 4), jnp.uint16)
            weight.set_value(
                Mxfp4Weight(words, jax.ShapeDtypeStruct((count, width // 32, *outputs), jnp.uint8))
            )
    assert_runs(target, NGramDrafter(3))
