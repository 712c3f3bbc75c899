import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from converted_gguf import without_dense_layers, write_converted
from golden_files import golden_checkpoint
from tiny_folder import CONFIG, arrays, assert_same_tensors, write_folder, write_json, write_tokenizer
from tiny_gguf import hf_weights, metadata, write_gguf
from tiny_tokenizers import byte_level

import jaxspec.models  # noqa: F401 - registers the families
from jaxspec.files import CheckpointError, open_checkpoint, save_orbax, save_safetensors
from jaxspec.files.gguf.architecture import ARCHITECTURES
from jaxspec.files.safetensors.llama3_rope import llama3_parameters

SAVES = pytest.mark.parametrize("save", [save_orbax, save_safetensors])


@pytest.fixture
def head(tmp_path):
    write_tokenizer(write_folder(tmp_path / "head"))
    return open_checkpoint(tmp_path / "head")


@SAVES
def test_comes_back_bit_for_bit(tmp_path, head, save):
    save(tmp_path / "saved", head, progress=False)
    again = open_checkpoint(tmp_path / "saved")
    assert_same_tensors(again.tensors, arrays())
    assert again.config == CONFIG
    assert again.eos_token_ids == head.eos_token_ids
    assert again.tokenizer.encode("hello") == head.tokenizer.encode("hello")


def test_orbax_to_safetensors_and_back(tmp_path, head):
    save_orbax(tmp_path / "one", head, progress=False)
    save_safetensors(tmp_path / "two", open_checkpoint(tmp_path / "one"), progress=False, shard_bytes=200)
    save_orbax(tmp_path / "three", open_checkpoint(tmp_path / "two"), progress=False)
    assert_same_tensors(open_checkpoint(tmp_path / "three").tensors, arrays())


@SAVES
def test_gguf_comes_back_bit_for_bit(tmp_path, save):
    tiny = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {**metadata(), **byte_level()}))
    save(tmp_path / "saved", tiny, progress=False)
    again = open_checkpoint(tmp_path / "saved")
    assert_same_tensors(again.tensors, hf_weights())
    assert again.config == tiny.config
    assert again.tokenizer.chat_template == tiny.tokenizer.chat_template


@SAVES
def test_dtype_rounds_floats_only(tmp_path, head, save):
    save(tmp_path / "saved", head, dtype="bfloat16", progress=False)
    expected = {
        name: array if array.dtype.kind in "bi" else array.astype(ml_dtypes.bfloat16)
        for name, array in arrays().items()
    }
    assert_same_tensors(open_checkpoint(tmp_path / "saved").tensors, expected)


@SAVES
def test_nothing_is_overwritten(tmp_path, head, save):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="full: the folder is not empty"):
        save(tmp_path / "full", head)
    with pytest.raises(CheckpointError, match="precious: cannot be created"):
        save(tmp_path / "full" / "precious", head)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]


@SAVES
def test_unknown_dtype_is_named(tmp_path, head, save):
    with pytest.raises(CheckpointError, match="dtype 'int4' is not known; known: float32"):
        save(tmp_path / "saved", head, dtype="int4")
    save(tmp_path / "saved", head, progress=False)  # the failure left nothing behind


def test_unfinished_orbax_is_named(tmp_path, head):
    save_orbax(tmp_path / "saved", head, progress=False)
    (tmp_path / "saved" / "orbax" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="orbax: not a complete orbax checkpoint"):
        open_checkpoint(tmp_path / "saved")


def test_empty_tensor_is_named(tmp_path, head):
    head.tensors["none"] = SimpleNamespace(read=lambda: np.zeros(0, np.float32))
    with pytest.raises(CheckpointError, match="tensor 'none' has no elements"):
        save_orbax(tmp_path / "saved", head, progress=False)


@SAVES
def test_interrupted_save_leaves_nothing_that_opens(tmp_path, head, save):
    def interrupted():
        raise KeyboardInterrupt

    head.tensors["late"] = SimpleNamespace(read=interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "saved", head, progress=False)
    with pytest.raises(CheckpointError, match=r"config\.json: file not found"):
        open_checkpoint(tmp_path / "saved")


@SAVES
def test_files_get_the_users_umask(tmp_path, head, save):
    before = os.umask(0o027)
    try:
        save(tmp_path / "saved", head, progress=False)
    finally:
        os.umask(before)
    for path in (tmp_path / "saved").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


FAMILIES = {
    "llama-tied": "LlamaForCausalLM",
    "qwen2-tied": "Qwen2ForCausalLM",
    "qwen3-tied": "Qwen3ForCausalLM",
    "qwen3-moe-layer-types": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3-long": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "qwen3-5": "Qwen3_5ForCausalLM",
    "qwen3-5-moe": "Qwen3_5MoeForCausalLM",
    "nemotron-h": "NemotronHForCausalLM",
}


def saved_json(tmp_path, name):
    return json.loads((tmp_path / "saved" / name).read_text("utf-8"))


@pytest.mark.parametrize("case", FAMILIES)
def test_a_converted_gguf_names_what_transformers_and_vllm_need(tmp_path, case):
    """With these keys, transformers 5.23 loaded every one and gave the logits of the goldens."""
    checkpoint = golden_checkpoint(case)
    if case == "qwen3-next":
        checkpoint = without_dense_layers(checkpoint)
    path = write_converted(tmp_path / "tiny.gguf", checkpoint)
    save_safetensors(tmp_path / "saved", open_checkpoint(path), progress=False)
    assert open_checkpoint(tmp_path / "saved").tensors.keys() <= checkpoint.tensors.keys()
    config, golden = saved_json(tmp_path, "config.json"), checkpoint.config
    assert config["architectures"] == golden["architectures"] == [FAMILIES[case]]
    assert (config["model_type"], config["torch_dtype"]) == (golden["model_type"], "float32")
    assert not {"rope_scaling", "rope_parameters"} <= config.keys()  # transformers reads one of them
    # A key that is missing would be a default of the family, past a small vocabulary.
    assert all(key in config for key in ("bos_token_id", "eos_token_id", "pad_token_id"))
    if case == "deepseek-v3":
        assert config["head_dim"] == config["qk_rope_head_dim"]
        assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")


def test_every_gguf_architecture_has_a_class():
    assert all(architecture.model_class for _, architecture in ARCHITECTURES.values())
    assert {architecture.model_class for _, architecture in ARCHITECTURES.values()} == {*FAMILIES.values()}


def test_factors_of_a_gguf_become_parameters_that_transformers_knows(tmp_path):
    golden = golden_checkpoint("llama-untied-llama3-rope")
    path = write_converted(tmp_path / "tiny.gguf", golden)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"]["rope_type"] == "factors"
    save_safetensors(tmp_path / "saved", checkpoint, progress=False)
    found, stated = saved_json(tmp_path, "config.json")["rope_scaling"], golden.config["rope_parameters"]
    assert found == {key: stated[key] for key in found}


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "length"),
    [(128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 5e5, 32.0, 1.0, 4.0, 8192), (128, 1e4, 4.0, 1.0, 8.0, 2048)],
)
def test_parameters_of_llama3_are_found_from_factors(head_dim, theta, factor, low, high, length):
    turns = length * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32).tolist()
    found = llama3_parameters(factors, theta)
    assert found.pop("rope_type") == "llama3"
    assert list(found.values()) == pytest.approx([factor, low, high, length], rel=1e-3)
    assert llama3_parameters([1.0, 5.0, 2.0, 3.0] * (head_dim // 8), theta) is None


def test_dequantized_weights_are_not_called_quantized(tmp_path):
    quantized = golden_checkpoint("gpt-oss-mxfp4")
    assert "quantization_config" in quantized.config
    for save in (save_orbax, save_safetensors):
        save(tmp_path / save.__name__, quantized, progress=False)
        again = open_checkpoint(tmp_path / save.__name__)
        assert "quantization_config" not in again.config
        assert_same_tensors(again.tensors, {name: t.read() for name, t in quantized.tensors.items()})


def test_dequantized_weights_of_a_nested_config_are_not_called_quantized(tmp_path, head):
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}}
    head = replace(head, config={**nested, "compression_config": {"format": "pack-quantized"}})
    save_safetensors(tmp_path / "saved", head, dtype="float16", progress=False)
    expected = {"text_config": {"dtype": "float16"}, "torch_dtype": "float16"}
    assert saved_json(tmp_path, "config.json") == expected


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_states_the_dtype_that_weights_are_rounded_to(tmp_path, head, key):
    head = replace(head, config={**CONFIG, key: "bfloat16"})
    save_safetensors(tmp_path / "saved", head, dtype="float32", progress=False)
    assert saved_json(tmp_path, "config.json") == {**CONFIG, key: "float32"}


def test_defaults_of_generation_are_kept(tmp_path, head):
    write_json(tmp_path / "head" / "generation_config.json", {"temperature": 0.6, "eos_token_id": 7})
    save_safetensors(tmp_path / "saved", open_checkpoint(tmp_path / "head"), progress=False)
    stated = saved_json(tmp_path, "generation_config.json")
    assert stated == {"temperature": 0.6, "eos_token_id": [7, 2]}


def test_transformers_takes_the_saved_tokenizer_as_it_is(tmp_path, head):
    save_safetensors(tmp_path / "saved", head, progress=False)
    config = saved_json(tmp_path, "tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["clean_up_tokenization_spaces"] is False
