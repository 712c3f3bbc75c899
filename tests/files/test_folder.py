import os
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_folder import CONFIG, arrays, assert_same_tensors, write_folder, write_json, write_tokenizer

from jaxspec.files import CheckpointError, TextStream, open_checkpoint


def test_head_without_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path))
    assert checkpoint.config == CONFIG
    assert checkpoint.name == str(tmp_path)
    assert checkpoint.tokenizer is None
    assert checkpoint.eos_token_ids == (7,)
    assert_same_tensors(checkpoint.tensors, arrays())


def test_nested_config_is_passed_as_it_is(tmp_path):
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 4, "x": [1]}}
    write_json(write_folder(tmp_path) / "config.json", nested)
    assert open_checkpoint(tmp_path).config == nested


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    write_tokenizer(write_folder(tmp_path))
    assert open_checkpoint(tmp_path).eos_token_ids == (7, 2)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 2]})
    assert open_checkpoint(tmp_path).eos_token_ids == (5, 2)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": {"id": 5}})
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list of them"):
        open_checkpoint(tmp_path)


def test_an_end_that_files_call_no_special_token_is_no_part_of_a_text(tmp_path):
    write_tokenizer(write_folder(tmp_path))
    before = open_checkpoint(tmp_path).tokenizer
    end = before.vocabulary["<a tool>"]
    text = before.encode("hey", add_special_tokens=False)
    assert before.decode([*text, end]) == "hey<a tool>"
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [end, text[0]]})
    tokenizer = open_checkpoint(tmp_path).tokenizer
    assert tokenizer.vocabulary == before.vocabulary
    assert tokenizer.decode([*text, end]) == "hey"
    stream = TextStream(tokenizer.backend)
    assert stream.feed([*text, end]) + stream.finish() == "hey"
    assert tokenizer.encode("hey<a tool>") == before.encode("hey<a tool>")


def test_end_tokens_may_be_those_of_the_nested_language_model(tmp_path):
    path = write_folder(tmp_path) / "config.json"
    nested = {"model_type": "gemma3", "text_config": {"eos_token_id": [1, 6]}}
    write_json(path, nested)
    assert open_checkpoint(tmp_path).eos_token_ids == (1, 6)
    write_json(path, {**nested, "eos_token_id": 5})
    assert open_checkpoint(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "file not found"), ("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")],
)
def test_config_must_be_a_json_object(tmp_path, content, message):
    path = write_folder(tmp_path) / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("ids", [10**12, [3, 2**31], -1, True, [[3]], "7"])
def test_end_tokens_that_are_no_token_ids_are_named(tmp_path, ids):
    write_json(write_folder(tmp_path) / "generation_config.json", {"eos_token_id": ids})
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list of them, got"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", 4, None])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_in_a_format_that_is_not_read_are_refused_by_its_name(tmp_path, method, nested):
    quantization = {"quantization_config": {"quant_method": method, "bits": 4}}
    changed = {"text_config": quantization} if nested else quantization
    write_json(write_folder(tmp_path) / "config.json", {**CONFIG, **changed})
    message = f"weights quantized by {method!r} (quant_method) are not supported; supported: mxfp4, fp8, "
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "bitsandbytes"),
    ],
)
def test_packed_weights_that_the_config_does_not_mention_are_refused_by_name(tmp_path, name, method):
    save_file({name: np.zeros((2, 2), np.int32)}, write_folder(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}' was quantized by {method}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than 64 levels"),
        (b'{"a": [' + b"{}," * 500_000 + b"1]}", "holds more than 500000 values"),
        (b'{"a": "' + b"x" * 2**24 + b'"}', "larger than 16777216 bytes"),
        (b'{"a": "\\ud800"}', "not valid Unicode: a lone surrogate"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
    ],
)
def test_json_beyond_any_bound_is_refused(tmp_path, content, message):
    (write_folder(tmp_path) / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    path = write_folder(tmp_path) / "config.json"
    path.write_bytes(b'{"a": "\\ud83d\\ude00", "b": {"c": [{"d": 1}]}}')
    assert open_checkpoint(tmp_path).config == {"a": "\N{GRINNING FACE}", "b": {"c": [{"d": 1}]}}


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ],
)
def test_a_folder_where_a_file_belongs_is_named(tmp_path, file):
    write_tokenizer(write_folder(tmp_path))
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).mkdir()
    with pytest.raises(CheckpointError, match=rf"{file}: not a file"):
        open_checkpoint(tmp_path)


def test_a_pipe_is_not_read(tmp_path):
    path = write_folder(tmp_path) / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"config\.json: not a file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", "~nobody-of-this-name/model"])
def test_a_path_that_cannot_be_is_one_line(source):
    with pytest.raises(CheckpointError):
        open_checkpoint(source)


@pytest.mark.parametrize("content", [b'{"\\udc00": 1}', b'{"a": [{"b": "\\ud800\\ud83d\\ude00"}]}'])
def test_a_lone_surrogate_is_found_in_keys_and_depths(tmp_path, content):
    (write_folder(tmp_path) / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="not valid Unicode: a lone surrogate"):
        open_checkpoint(tmp_path)
