"""Weights kept as a checkpoint stores them are the weights that dense loading makes, bit for bit."""

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench.traffic import weight_bytes
from flax import nnx
from golden_files import golden_checkpoint
from jaxspec_kernels.matmul import PackedRows, PackedWeight, matmul, pack
from safetensors.numpy import load_file, save_file
from tiny_gguf import gguf_tensors, hf_weights, write_gguf
from tiny_models import write_eagle3, write_target

import jaxspec
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.base import Build
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.drafters.loading import load_drafter
from jaxspec.engine.device.step import Models
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.quantized.blocks import round_to_blocks
from jaxspec.models.target import load_target, plan_target
from jaxspec.weights import packed_weights
from jaxspec.weights.derived_tensors import OutputRows
from jaxspec.weights.loading import declared, export_tensors
from jaxspec.weights.packed_weights import packed_weight, resolve_activations, rounds_activations
from jaxspec.weights.parameters import Projection

FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)


def weights():
    """By GGUF names, without the bias that only the queries have."""
    return {name: w for name, w in gguf_tensors(hf_weights()).items() if name != "blk.0.attn_q.bias"}


def quantized(path, kind, *, tied=True, dense=()):
    """A GGUF of the tiny llama whose matrices are of a kind, those in `dense` float32."""
    tensors = {}
    for name, weight in weights().items():
        if tied and name == "output.weight":
            continue
        if weight.ndim == 2 and name not in dense:
            quantization = gguf.GGMLQuantizationType[kind]
            tensors[name] = (gguf.quants.quantize(weight / 16, quantization), kind)
        else:
            tensors[name] = weight
    return write_gguf(path, tensors=tensors)


def both(checkpoint):
    """The same target, packed and dense."""
    packed = plan_target(checkpoint, dtype=FLOAT32).read(packed=True)
    return packed, load_target(checkpoint, dtype=FLOAT32)


def forms(model):
    stored = [variable.get_value() for variable, _ in declared(model)]
    stored = [value.columns if isinstance(value, PackedRows) else value for value in stored]
    return [value.form if isinstance(value, PackedWeight) else None for value in stored]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_0", "uint8"), ("Q4_1", "uint8")])
def test_quantized_matrices_stay_packed_and_mean_the_same(tmp_path, kind, form, tied):
    packed, dense = both(open_checkpoint(quantized(tmp_path / "tiny.gguf", kind, tied=tied)))
    # The fused attention weight, its output, gate and up, down, the output projection, and the embedding.
    assert forms(packed).count(form) == (5 if tied else 6)
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
    assert forms(packed).count("bfloat16") == 6
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_value()), other.get_value())


@pytest.mark.parametrize("tied", [True, False])
def test_a_benchmark_counts_the_bytes_as_packed(tmp_path, tied):
    packed, _ = both(open_checkpoint(quantized(tmp_path / "tiny.gguf", "Q4_1", tied=tied)))
    of_part = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(part))
        for name, part in nnx.state(packed, nnx.Param).items()
    }
    # An embedding of its own is only looked up.
    expected = sum(of_part.values()) - (0 if tied else of_part["embedding"])
    assert weight_bytes(Models(packed, NoDrafter()), batch_size=1) == expected


def test_a_fused_weight_of_two_formats_is_dense(tmp_path):
    path = quantized(tmp_path / "tiny.gguf", "Q4_1", dense=("blk.0.attn_k.weight", "blk.0.ffn_up.weight"))
    packed, _ = both(open_checkpoint(path))
    assert forms(packed).count("uint8") == 3


def test_other_formats_and_float32_are_dense(tmp_path):
    packed, _ = both(open_checkpoint(write_target(tmp_path / "target")))
    assert set(forms(packed)) == {None}


def test_weights_that_fit_into_a_cache_are_dense(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 4 * 300 * 256)
    packed, _ = both(open_checkpoint(quantized(tmp_path / "tiny.gguf", "Q4_1")))
    assert forms(packed).count("uint8") == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_tokens_are_read_out_of_a_packed_embedding_or_projection(tmp_path, kind, tied):
    packed, dense = both(open_checkpoint(quantized(tmp_path / "tiny.gguf", kind, tied=tied)))
    tokens = jnp.array([[0, 7], [299, 5000]])
    np.testing.assert_array_equal(packed.embed(tokens), dense.embed(tokens), strict=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_heads_output_rows_are_packed_where_the_targets_are(tmp_path, kind):
    checkpoint = open_checkpoint(quantized(tmp_path / "tiny.gguf", kind))
    packed, dense = both(checkpoint)
    ids = np.array([3, 290, 1])
    rows = OutputRows(ids, packed.config.hidden_size, kernel=packed.output_kernel)
    weight = packed_weight(Projection("lm_head.weight", (256,), (3,)), (256, 3), [rows])
    assert weight is not None
    np.testing.assert_array_equal(np.asarray(weight), dense.output_kernel[:, ids])
    np.testing.assert_array_equal(rows.read(), np.asarray(dense.output_kernel[:, ids]).T)


@pytest.mark.parametrize("tied", [True, False])
def test_export_and_saving_are_dense(tmp_path, tied):
    checkpoint = open_checkpoint(quantized(tmp_path / "tiny.gguf", "Q4_1", tied=tied))
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
        quantized = (
            gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]) if weight.ndim == 2 else weight
        )
        tensors[key] = (quantized.view(np.uint8), kind) if weight.ndim == 2 else weight
    tensors[name][0][3, byte] |= 0x7F
    tensors[name][0][3, byte - 1] |= 0x80
    plan = plan_target(open_checkpoint(write_gguf(tmp_path / "bad.gguf", tensors=tensors)), dtype=FLOAT32)
    with pytest.raises(
        CheckpointError, match=r"bad\.gguf: tensor 'model\.layers\.0\.self_attn\.k_proj\.weight' holds NaN"
    ):
        plan.read(packed=packed)


@pytest.mark.skipif(matmul.why_not("numba") is not None, reason=f"{matmul.why_not('numba')}")
def test_an_engine_gives_the_same_tokens_packed_and_dense(tmp_path, monkeypatch):
    path = quantized(tmp_path / "tiny.gguf", "Q4_1")
    sizes = {"batch_size": 1, "page_size": 8, "prefill_chunk": 16, "sampling_modes": ("greedy",)}

    def answer():
        engine = jaxspec.load(
            path, drafter={"kind": "ngram"}, cpu_activations="float32", progress=False, **sizes
        )
        is_packed = any(leaf.dtype == jnp.uint8 for leaf in engine.programs.leaves)
        assert {cache.dtype for cache in engine.core.state.target_cache} == {FLOAT32}
        return is_packed, engine.generate([3, 1, 4, 1, 5], max_new_tokens=12, ignore_eos=True).token_ids

    is_packed, tokens = answer()
    assert is_packed
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 1 << 60)
    assert answer() == (False, tokens)


@pytest.mark.skipif(matmul.why_not("numba") is not None, reason=f"{matmul.why_not('numba')}")
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_drafts_change_no_token_with_rows_of_8_bits(tmp_path, kind):
    path = quantized(tmp_path / "tiny.gguf", kind)
    sizes = {"batch_size": 2, "page_size": 8, "prefill_chunk": 16, "sampling_modes": ("greedy",)}
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]]

    def answers(**drafter):
        engine = jaxspec.load(path, drafter=drafter, cpu_activations="int8", progress=False, **sizes)
        assert {cache.dtype for cache in engine.core.state.target_cache} == {jnp.dtype("float16")}
        answers = engine.generate(prompts, max_new_tokens=80, ignore_eos=True)
        return [answer.token_ids for answer in answers], [answer.stats for answer in answers]

    plain, _ = answers(kind="none")
    drafted, stats = answers(kind="ngram", num_speculative_tokens=4)
    assert drafted == plain
    rates = [rate for one in stats for rate in one.acceptance_per_position]
    assert max(rates) > 0
    assert min(rates) < 1


def activations_of(model):
    return {
        value.activations
        for variable, _ in declared(model)
        if isinstance(value := variable.get_value(), PackedWeight)
    }


def test_a_weight_says_what_it_is_multiplied_with(tmp_path):
    plan = plan_target(open_checkpoint(quantized(tmp_path / "tiny.gguf", "Q8_0")), dtype=FLOAT32)
    for activations in ("int8", "float32"):
        model = plan.read(packed=True, activations=activations)
        assert activations_of(model) == {activations}
        assert rounds_activations(nnx.state(model)) == (activations == "int8")
    assert not rounds_activations(nnx.state(plan.read(packed=False)))


def test_rounded_matrices_are_blocks_too(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tensors=weights())
    plan = plan_target(open_checkpoint(path), dtype=FLOAT32)
    dense = load_target(open_checkpoint(path), dtype=FLOAT32)
    rounded = plan.read(packed=True, activations="int8", rounded=True)
    assert forms(rounded).count("uint8") == 5
    for (one, _), (other, _) in zip(declared(rounded), declared(dense), strict=True):
        given = np.asarray(other.get_value())
        assert np.abs(np.asarray(one.get_value()) - given).max() <= np.abs(given).max() / 10


def test_rounded_matrices_are_fitted_by_blocks():
    matrix = np.random.default_rng(0).standard_normal((50, 96)).astype(np.float32)
    matrix[2, 32:64] = 0
    matrix[3, 32:64] = 0.3
    blocks = round_to_blocks(matrix)
    scale, offset = (np.repeat(array, 32, axis=1) for array in (blocks.scale, blocks.offset))
    error = np.abs(scale * blocks.values + offset - matrix)
    assert error.max() < 0.25
    assert error[2:4, 32:64].max() < 1e-4
    for array in (blocks.scale, blocks.offset):
        assert (array == array.astype(np.float16)).all()
    # From each block's least number to its largest in steps of a fifteenth.
    by_block = matrix.reshape(50, 3, 32)
    low = by_block.min(axis=-1, keepdims=True)
    step = np.maximum(by_block.max(axis=-1, keepdims=True) - low, 1e-9) / 15
    unfitted = low + np.rint((by_block - low) / step) * step - by_block
    assert (error**2).mean() < 0.97 * (unfitted**2).mean()
    for value in (1e10, np.nan):
        matrix[1, 1] = value
        assert round_to_blocks(matrix) is None


def test_the_fit_follows_what_counts():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((50, 96)).astype(np.float32)
    importance = np.square(rng.lognormal(size=96)).astype(np.float32)
    importance[32:64] = 0

    def error(counts):
        blocks = round_to_blocks(matrix, counts)
        scale, offset = (np.repeat(array, 32, axis=1) for array in (blocks.scale, blocks.offset))
        return np.square(scale * blocks.values + offset - matrix).mean(axis=0)

    plain, fitted = error(None), error(importance)
    assert importance @ fitted < 0.8 * (importance @ plain)
    np.testing.assert_array_equal(fitted[32:64], plain[32:64])
    np.testing.assert_array_equal(error(np.zeros(96, np.float32)), plain)


@pytest.mark.parametrize("own_rows", [True, False])
def test_output_rows_are_fitted_to_the_norm_before_them(tmp_path, own_rows):
    target = write_target(tmp_path / "target", num_hidden_layers=4)
    head = write_eagle3(tmp_path / "head", target, repeats=False)
    stored = load_file(head / "model.safetensors")
    stored["norm.weight"] = np.random.default_rng(0).lognormal(size=32).astype(np.float32)
    if not own_rows:
        ids = stored["d2t"] + np.arange(40)
        stored["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"][ids]
    rows = stored["lm_head.weight"]
    save_file(
        {k: v for k, v in stored.items() if own_rows or k != "lm_head.weight"}, head / "model.safetensors"
    )
    build = Build(FLOAT32, packed=True, activations="int8")
    drafter = load_drafter(
        DrafterConfig("eagle3", 2, str(head)), load_target(open_checkpoint(target), dtype=FLOAT32), build
    )
    blocks = round_to_blocks(rows, np.square(stored["norm.weight"]))
    np.testing.assert_array_equal(
        np.asarray(drafter.head.kernel[...]).T, blocks.scale * blocks.values + blocks.offset
    )


def test_a_heads_output_rows_are_rounded_out_of_a_targets_8_bits():
    matrix = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    kernel = pack(
        np.rint(matrix.T * 50).clip(-127, 127).astype(np.int8),
        np.full((64, 1), 1 / 50, np.float32),
        None,
        (32, 64),
        activations="int8",
    )
    rows = OutputRows(np.array([3, 5, 60]), 32, kernel=kernel)
    source = Projection("lm_head.weight", (32,), (3,))
    for rounded, form in ((True, "uint8"), (False, "int8")):
        packed = packed_weight(source, (32, 3), [rows], activations="int8", rounded=rounded)
        assert packed.form == form
        np.testing.assert_allclose(np.asarray(packed), matrix[:, [3, 5, 60]], atol=0.25)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_inputs_of_queries_keys_and_values_share_scales_in_smaller_blocks(tmp_path, kind):
    checkpoint = open_checkpoint(quantized(tmp_path / "tiny.gguf", kind, tied=False))
    model = plan_target(checkpoint, dtype=FLOAT32).read(packed=True, activations="int8")
    kernels = [variable.get_value() for variable, _ in declared(model)]
    blocks = [kernel.row_block for kernel in kernels if isinstance(kernel, PackedWeight)]
    assert model.layers[0].attention.qkv[...].row_block == 16
    assert sorted(blocks) == [16, 32, 32, 32, 32]


@pytest.mark.parametrize(
    ("golden", "expected"),
    [
        ("gemma3", {"q_proj", "k_proj", "v_proj"}),
        ("deepseek-v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}),
        ("deepseek-v3-direct", {"q_proj", "kv_a_proj_with_mqa"}),
    ],
)
def test_matrices_whose_inputs_have_smaller_blocks(golden, expected):
    target = load_target(golden_checkpoint(golden), dtype=FLOAT32)
    sources = [source for _, source in declared(target) if getattr(source, "is_sensitive", False)]
    assert {name.split(".")[-2] for source in sources for name, _ in source.tensors} == expected


def test_int8_activations_are_refused_by_name(tmp_path, monkeypatch):
    bfloat16 = jnp.dtype(jnp.bfloat16)
    monkeypatch.setattr(matmul, "why_not", lambda name: None)
    assert resolve_activations(None, FLOAT32) == resolve_activations("int8", FLOAT32) == "int8"
    assert resolve_activations("float32", FLOAT32) == "float32"
    assert resolve_activations(None, bfloat16) == "float32"
    assert resolve_activations(None, FLOAT32, devices=2) == "float32"
    with pytest.raises(ConfigError, match=r"packed weights are for one device, .*tensor_parallel is 2"):
        resolve_activations("int8", FLOAT32, devices=2)
    with pytest.raises(
        ConfigError, match=r"engine\.cpu_activations is 'int8': it needs engine\.dtype 'float32'"
    ):
        resolve_activations("int8", bfloat16)
    monkeypatch.setattr(matmul, "why_not", lambda name: "is for CPUs")
    assert resolve_activations(None, FLOAT32) == "float32"
    path = quantized(tmp_path / "tiny.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"engine\.cpu_activations is 'int8': its kernel is for CPUs"):
        jaxspec.load(path, cpu_activations="int8", progress=False)
