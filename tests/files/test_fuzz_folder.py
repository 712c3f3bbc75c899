"""Folders whose files somebody broke are read, or refused by our own exceptions in one line."""

import json

import pytest
from fuzzing import VALUES, changed, damaged, refused_or
from hypothesis import given
from hypothesis import strategies as st
from tiny_folder import write_folder, write_tokenizer

from jaxspec.files import open_checkpoint

MESSAGES = [{"role": "user", "content": "hello w0rld é 🎉"}]
JSON_FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
KEYS = (
    *("eos_token_id", "quantization_config", "quant_method", "weight_block_size", "text_config"),
    *("bos_token", "eos_token", "unk_token", "chat_template", "weight_map", "content", "name", "template"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of shards with a tokenizer, and every JSON file that is read."""
    folder = write_folder(tmp_path_factory.mktemp("fuzz") / "folder", shards=2)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    return folder


def use(folder):
    """Opens a folder and does with it what an engine does."""
    checkpoint = open_checkpoint(folder)
    for tensor in checkpoint.tensors.values():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
    assert all(0 <= token < 2**31 for token in checkpoint.eos_token_ids)
    tokenizer = checkpoint.tokenizer
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode(MESSAGES[0]["content"]))
        if tokenizer.has_chat_template:
            tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)


def with_file(folder, name, content):
    """Uses the folder with another content of one file, and puts the former one back."""
    path = folder / name
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        refused_or(lambda: use(folder))
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX])
@given(data=st.data())
def test_json_of_other_values(folder, name, data):
    document = json.loads((folder / name).read_text("utf-8"))
    broken = data.draw(changed(document, KEYS))
    with_file(folder, name, json.dumps(broken).encode())


@given(data=st.data())
def test_json_of_other_bytes(folder, data):
    path = folder / "tokenizer_config.json"
    values = VALUES.map(lambda value: json.dumps(value).encode())
    broken = data.draw(damaged(path.read_bytes()) | st.binary(max_size=64) | values)
    with_file(folder, path.name, broken)
