import hashlib
import os
from pathlib import Path

import pytest

from jaxspec.files import CheckpointError
from jaxspec.files.cache import cache_folder, check_sha256, private_folder


def mode_of(path):
    return path.stat().st_mode & 0o777


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


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    private_folder(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a" / "b") == 0o700
    (tmp_path / "a" / "b").chmod(0o755)
    private_folder(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a" / "b") == 0o700


def test_others_may_read_a_folder_of_downloads_if_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        private_folder(tmp_path / "downloads", is_readable=True)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "downloads") == 0o750


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_write_to_is_refused_and_left_alone(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(CheckpointError, match="other users can write into it"):
        private_folder(tmp_path)
    assert mode_of(tmp_path) == mode


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        private_folder(tmp_path)


def test_a_link_is_refused_and_not_followed(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o755)
    link.symlink_to(folder)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        private_folder(link)
    assert mode_of(folder) == 0o755


def test_a_link_put_there_in_between_is_not_followed(tmp_path, monkeypatch):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o755)
    link.symlink_to(folder)
    monkeypatch.setattr(Path, "is_symlink", lambda self: False)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        private_folder(link)
    assert mode_of(folder) == 0o755
