import hashlib

import pytest

from jaxspec.checkpoints import CheckpointError
from jaxspec.checkpoints.cache import cache_folder, check_sha256


def test_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "jaxspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jaxspec"
    monkeypatch.setenv("JAXSPEC_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_hash_is_compared(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    good = hashlib.sha256(b"content").hexdigest()
    check_sha256(path, good)
    check_sha256(path, good.upper())
    with pytest.raises(CheckpointError, match=f"file: sha256 is {good}, expected {'0' * 64}"):
        check_sha256(path, "0" * 64)
    with pytest.raises(CheckpointError, match="must be 64 hexadecimal digits, got 'abc'"):
        check_sha256(path, "abc")
