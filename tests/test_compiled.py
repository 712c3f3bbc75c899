"""The folder in which the tests keep compiled programs."""

import os
import time
import zlib

import compiled
import pytest
from compiled import compiled_folder

PROGRAM = zlib.compress(bytes(1000))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    return tmp_path


def test_programs_are_kept_between_runs_but_not_between_versions(cache, monkeypatch):
    folder = compiled_folder()
    assert folder.is_relative_to(cache)
    (folder / "a-cache").write_bytes(PROGRAM)
    assert compiled_folder() == folder
    assert (folder / "a-cache").exists()
    monkeypatch.setattr(compiled, "version", lambda package: "another")
    other = compiled_folder()
    assert other != folder
    assert folder.exists()
    long_ago = time.time() - compiled.MOST_SECONDS - 1
    os.utime(folder, (long_ago, long_ago))
    assert compiled_folder() == other
    assert not folder.exists()


@pytest.mark.parametrize("left", [0, 5, len(PROGRAM) - 1])
def test_a_half_written_program_is_removed(cache, left):
    folder = compiled_folder()
    (folder / "whole-cache").write_bytes(PROGRAM)
    (folder / "half-cache").write_bytes(PROGRAM[:left])
    compiled_folder()
    assert [path.name for path in folder.glob("*-cache")] == ["whole-cache"]


def test_the_oldest_programs_make_room(cache, monkeypatch):
    folder = compiled_folder()
    for age, name in enumerate("abc"):
        (folder / f"{name}-cache").write_bytes(PROGRAM)
        os.utime(folder / f"{name}-cache", (time.time() - age,) * 2)
    monkeypatch.setattr(compiled, "MOST_BYTES", 2 * len(PROGRAM))
    compiled_folder()
    assert {path.name for path in folder.glob("*-cache")} == {"a-cache", "b-cache"}


def test_without_a_place_that_can_be_written_the_folder_is_temporary(cache, monkeypatch):
    (cache / "tests").write_text("a file")
    folder = compiled_folder()
    assert folder.is_dir()
    assert not folder.is_relative_to(cache)


def test_a_folder_that_others_can_write_to_is_not_used(cache):
    (cache / "tests").mkdir()
    (cache / "tests").chmod(0o777)
    assert not compiled_folder().is_relative_to(cache)
