import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from tiny_folder import CONFIG, arrays, assert_same_tensors, write_folder, write_tokenizer
from tiny_gguf import hf_weights, metadata, write_gguf
from tiny_tokenizers import byte_level

from jaxspec.checkpoints import CheckpointError, open_checkpoint, save_orbax, save_safetensors

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
