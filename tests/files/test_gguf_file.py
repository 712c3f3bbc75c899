import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny_gguf
from ggml_blocks import VALUES, expected_values, random_blocks
from tiny_gguf import gguf_tensors, hf_weights, metadata, write_gguf

from jaxspec.files import CheckpointError, open_checkpoint


def test_names_layout_and_values_are_hugging_face(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf"))
    weights = hf_weights()
    assert set(checkpoint.tensors) == set(weights)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.shape == weights[name].shape
        np.testing.assert_array_equal(tensor.read(), weights[name], strict=True)


def test_config_comes_from_metadata(tmp_path):
    config = open_checkpoint(write_gguf(tmp_path / "tiny.gguf")).config
    expected = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": True,
    }
    assert expected.items() <= config.items()


def test_head_is_tied_without_an_output_tensor(tmp_path):
    weights = {name: w for name, w in hf_weights().items() if name != "lm_head.weight"}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=gguf_tensors(weights)))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensors


def test_rope_factors_go_into_the_config(tmp_path):
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    tensors = {**gguf_tensors(hf_weights()), "rope_freqs.weight": factors}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert set(checkpoint.tensors) == set(hf_weights())


def test_rope_scaling_metadata(tmp_path):
    values = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    config = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", values)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("kind", VALUES)
def test_quantized_values_follow_the_formulas(tmp_path, kind):
    blocks = 1 if kind.endswith("K") else 8
    packed = random_blocks(kind, rows=5, blocks=blocks)
    tensors = {"token_embd.weight": np.zeros((300, 256), np.float32), "blk.0.attn_v.weight": (packed, kind)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    tensor = checkpoint.tensors["model.layers.0.self_attn.v_proj.weight"]
    assert (tensor.shape, tensor.dtype) == ((5, 256), np.float32)
    np.testing.assert_array_equal(tensor.read(), expected_values(kind, packed), strict=True)


def readable():
    """Names of all block formats whose values the `gguf` package can compute."""
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind.name


@pytest.mark.parametrize("kind", list(readable()))
def test_every_format_that_the_package_reads_is_read(tmp_path, kind):
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    # Bytes below 64 make no float16 infinite and no exponent large.
    packed = np.random.default_rng(0).integers(0, 64, (5, 256 // block * size), dtype=np.uint8)
    tensors = {"token_embd.weight": np.zeros((300, 256), np.float32), "blk.0.attn_v.weight": (packed, kind)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    tensor = checkpoint.tensors["model.layers.0.self_attn.v_proj.weight"]
    assert tensor.shape == (5, 256)
    np.testing.assert_array_equal(tensor.read(), gguf.quants.dequantize(packed, quantization))


def test_quantized_query_rows_are_put_back(tmp_path):
    packed = random_blocks("Q8_0", rows=256, blocks=8)
    stored = packed.reshape(4, 2, 32, -1).swapaxes(1, 2).reshape(256, -1)
    tensors = {"token_embd.weight": np.zeros((300, 256), np.float32), "blk.0.attn_q.weight": (stored, "Q8_0")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
    values = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].read()
    np.testing.assert_array_equal(values, expected_values("Q8_0", packed))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_half_precision_is_read_as_stored(tmp_path, kind, dtype):
    weight = np.random.default_rng(0).normal(size=(300, 256)).astype(dtype)
    tensors = {"token_embd.weight": (weight.view(np.uint8), kind)}
    tensor = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors)).tensors[
        "model.embed_tokens.weight"
    ]
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.read(), weight, strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, r"llama\.block_count must be a positive integer, got None"),
        ({"split.count": 3}, "one of 3 parts, but not named NAME-00001-of-00003"),
        ({"llama.rope.dimension_count": 32}, "rope over 32 of 64 dimensions"),
    ],
)
def test_metadata_that_does_not_fit_is_named(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "bad.gguf", metadata(**changes)))


def test_unknown_architecture_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="architecture 'bloom' is not supported"):
        open_checkpoint(write_gguf(tmp_path / "bad.gguf", architecture="bloom"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.0.ffn_gate_exps.weight", np.zeros((4, 256), np.float32), "not part of the llama architecture"),
        ("blk.0.attn_v.weight", (np.zeros((4, 256), np.uint8), "I8"), "is I8, which is not supported"),
        ("blk.0.attn_q.weight", np.zeros((4, 256), np.float32), "has 4 rows for 4 heads"),
        ("rope_freqs.weight", np.zeros(7, np.float32), r"F32 of shape \[7\], expected F32 of shape \[32\]"),
    ],
)
def test_tensor_that_does_not_belong_is_named(tmp_path, name, tensor, message):
    tensors = {"token_embd.weight": np.zeros((300, 256), np.float32), name: tensor}
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        open_checkpoint(write_gguf(tmp_path / "bad.gguf", tensors=tensors))


def test_embedding_must_be_there(tmp_path):
    tensors = {"output_norm.weight": np.zeros(tiny_gguf.HIDDEN, np.float32)}
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
        open_checkpoint(write_gguf(tmp_path / "bad.gguf", tensors=tensors))
