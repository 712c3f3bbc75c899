"""Weights kept as a checkpoint stores them are the weights that dense loading makes, bit for bit."""

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxspec_kernels.matmul import PackedWeight, matmul
from tiny_gguf import gguf_tensors, hf_weights, write_gguf
from tiny_models import write_target

import jaxspec
from jaxspec.checkpoints import CheckpointError, open_checkpoint
from jaxspec.drafters.head import OutputRows
from jaxspec.models import packed_weights
from jaxspec.models.loading import declared, export_tensors, load_target, plan_target
from jaxspec.models.packed_weights import packed_weight
from jaxspec.models.parameters import Projection

FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)


def weights():
    """By GGUF names, without the bias that only the queries have."""
    return {name: w for name, w in gguf_tensors(hf_weights()).items() if name != "blk.0.attn_q.bias"}


def quantised(path, kind, *, tied=True, dense=()):
    """A GGUF of the tiny llama whose matrices are of a kind, those in `dense` float32."""
    tensors = {}
    for name, weight in weights().items():
        if tied and name == "output.weight":
            continue
        if weight.ndim == 2 and name not in dense:
            quantisation = gguf.GGMLQuantizationType[kind]
            tensors[name] = (gguf.quants.quantize(weight / 16, quantisation), kind)
        else:
            tensors[name] = weight
    return write_gguf(path, tensors=tensors)


def both(checkpoint):
    """The same target, packed and dense."""
    packed = plan_target(checkpoint, dtype=FLOAT32).read(packed=True)
    return packed, load_target(checkpoint, dtype=FLOAT32)


def forms(model):
    return [
        variable.get_value().form if isinstance(variable.get_value(), PackedWeight) else None
        for variable, _ in declared(model)
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_0", "uint8"), ("Q4_1", "uint8")])
def test_quantised_matrices_stay_packed_and_mean_the_same(tmp_path, kind, form, tied):
    packed, dense = both(open_checkpoint(quantised(tmp_path / "tiny.gguf", kind, tied=tied)))
    # The fused attention weight, its output, gate and up, down, and the output projection.
    assert forms(packed).count(form) == 5
    assert set(forms(packed)) == {form, None}
    assert set(forms(dense)) == {None}
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_value()), other.get_value())


def test_bfloat16_matrices_stay_so_and_mean_the_same(tmp_path):
    tensors = {
        name: (weight.astype(ml_dtypes.bfloat16).view(np.uint8), "BF16") if weight.ndim == 2 else weight
        for name, weight in weights().items()
    }
    packed, dense = both(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors)))
    assert forms(packed).count("bfloat16") == 5
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_value()), other.get_value())


def test_a_fused_weight_of_two_formats_is_dense(tmp_path):
    path = quantised(tmp_path / "tiny.gguf", "Q4_1", dense=("blk.0.attn_k.weight", "blk.0.ffn_up.weight"))
    packed, _ = both(open_checkpoint(path))
    assert forms(packed).count("uint8") == 3


def test_other_formats_and_float32_are_dense(tmp_path):
    packed, _ = both(open_checkpoint(write_target(tmp_path / "target")))
    assert set(forms(packed)) == {None}


def test_weights_that_fit_into_a_cache_are_dense(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 4 * 300 * 256)
    packed, _ = both(open_checkpoint(quantised(tmp_path / "tiny.gguf", "Q4_1")))
    assert forms(packed).count("uint8") == 3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_tied_embedding_reads_tokens_out_of_the_packed_projection(tmp_path, kind):
    packed, dense = both(open_checkpoint(quantised(tmp_path / "tiny.gguf", kind)))
    tokens = jnp.array([[0, 7], [299, 5000]])
    np.testing.assert_array_equal(packed.embed(tokens), dense.embed(tokens), strict=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_heads_output_rows_are_packed_where_the_targets_are(tmp_path, kind):
    checkpoint = open_checkpoint(quantised(tmp_path / "tiny.gguf", kind))
    packed, dense = both(checkpoint)
    ids = np.array([3, 290, 1])
    rows = OutputRows(ids, packed.config.hidden_size, packed.output_kernel)
    weight = packed_weight(Projection("lm_head.weight", (256,), (3,)), (256, 3), [rows])
    assert weight is not None
    np.testing.assert_array_equal(np.asarray(weight), dense.output_kernel[:, ids])
    np.testing.assert_array_equal(rows.read(), np.asarray(dense.output_kernel[:, ids]).T)


def test_export_and_saving_are_dense(tmp_path):
    checkpoint = open_checkpoint(quantised(tmp_path / "tiny.gguf", "Q4_1"))
    for model in both(checkpoint):
        exported = export_tensors(model)
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(exported[name], tensor.read(), strict=True)


@pytest.mark.parametrize(
    ("kind", "byte"),
    [("Q8_0", 1), ("Q4_0", 1), ("Q4_1", 1), ("Q4_1", 3), ("BF16", 1)],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_scale_or_value_that_is_no_number_is_named(tmp_path, kind, byte, packed):
    name = "blk.0.attn_k.weight"
    tensors = {}
    for key, weight in weights().items():
        quantised = (
            gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]) if weight.ndim == 2 else weight
        )
        tensors[key] = (quantised.view(np.uint8), kind) if weight.ndim == 2 else weight
    tensors[name][0][3, byte] |= 0x7F
    tensors[name][0][3, byte - 1] |= 0x80
    plan = plan_target(open_checkpoint(write_gguf(tmp_path / "bad.gguf", tensors=tensors)), dtype=FLOAT32)
    with pytest.raises(
        CheckpointError, match=r"bad\.gguf: tensor 'model\.layers\.0\.self_attn\.k_proj\.weight' holds NaN"
    ):
        plan.read(packed=packed)


@pytest.mark.skipif(matmul.why_not("numba") is not None, reason=f"{matmul.why_not('numba')}")
def test_an_engine_gives_the_same_tokens_packed_and_dense(tmp_path, monkeypatch):
    path = quantised(tmp_path / "tiny.gguf", "Q4_1")
    sizes = {"batch_size": 1, "page_size": 8, "prefill_chunk": 16, "sampling_modes": ("greedy",)}

    def answer():
        engine = jaxspec.load(path, drafter={"kind": "ngram"}, progress=False, **sizes)
        is_packed = any(leaf.dtype == jnp.uint8 for leaf in engine.programs.leaves)
        return is_packed, engine.generate([3, 1, 4, 1, 5], max_new_tokens=12, ignore_eos=True).token_ids

    is_packed, tokens = answer()
    assert is_packed
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 1 << 60)
    assert answer() == (False, tokens)
