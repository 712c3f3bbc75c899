import errno

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.utils import filter_repo_objects
from tiny_folder import arrays, assert_same_tensors, write_folder, write_tokenizer
from tiny_gguf import metadata, write_gguf

from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.hub import hub_folder, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A repository in the layout of the Hub's cache folder, with no network behind it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    write_tokenizer(write_folder(blobs, shards=2))
    write_gguf(blobs / "tiny.gguf", metadata())
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.mark.parametrize("source", ["org/tiny", f"org/tiny@{COMMIT}"])
def test_opens_a_repository(snapshot, source):
    checkpoint = open_checkpoint(source, progress=False)
    assert checkpoint.name == source
    assert checkpoint.tokenizer.eos_token_ids == (2,)
    assert_same_tensors(checkpoint.tensors, arrays())


def test_opens_a_file_of_a_repository(snapshot):
    checkpoint = open_checkpoint("org/tiny", file="tiny.gguf")
    assert checkpoint.config["hidden_size"] == 256


def test_a_file_in_several_is_downloaded_whole(snapshot, monkeypatch):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k) or snapshot)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("org/tiny", file="big-Q4_K_M-00001-of-00002.gguf")
    assert asked["allow_patterns"] == ["big-Q4_K_M-00001-of-00002.gguf", "big-Q4_K_M-00002-of-00002.gguf"]


def test_repository_out_of_reach_is_named(snapshot):
    with pytest.raises(CheckpointError, match="'org/other' is neither a local path nor a Hub repo") as caught:
        open_checkpoint("org/other")
    assert "\n" not in str(caught.value)


def test_downloads_neither_pickles_nor_code_nor_subfolders(snapshot, monkeypatch):
    asked = {}
    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k) or download(*a, **k)
    )
    open_checkpoint("org/tiny")
    wanted = ["config.json", "model-1.safetensors", "chat_template.jinja", "tokenizer.model"]
    wanted.append("additional_chat_templates/tool_use.jinja")
    unwanted = ["pytorch_model.bin", "modeling.py", "original/model.safetensors", "model.gguf"]
    unwanted += ["original/params.json", "original/tokenizer.model"]
    unwanted.append("consolidated.safetensors")  # the same weights in Mistral's own layout
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *unwanted], **patterns)) == wanted


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", True),
        ("org/Name-1.5_b@main", True),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("../name", False),
    ],
)
def test_what_looks_like_a_repository(source, expected):
    assert is_hub_id(source) == expected


def test_downloads_go_where_the_environment_says(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.update(k) or tmp_path)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "JAXSPEC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    hub_folder("org/tiny")
    assert asked["cache_dir"] is None
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    hub_folder("org/tiny")
    assert asked["cache_dir"] == tmp_path / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "own"))
    hub_folder("org/tiny")
    assert asked["cache_dir"] is None


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", "/home/nobody/.cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match=r"cannot write /home/nobody/.cache: Read-only.*JAXSPEC_CACHE"):
        hub_folder("org/tiny")
