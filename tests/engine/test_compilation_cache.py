import importlib
import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from at_once import Place, at_once
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxspec.engine.device.compilation_cache import compilation_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of a cache that nobody chose another one for, and that takes every program."""
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    names = ("compilation_cache_dir", "enable_compilation_cache", "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": jax.config.values[f"jax_{name}"] for name in names}
    for name, value in zip(before, (None, True, 0.0), strict=True):
        jax.config.update(name, value)
    jax_cache.reset_cache()  # the run's own, of conftest.py, is open
    yield tmp_path / "xla"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def compile_program(number):
    jax.jit(lambda x: x + number).lower(jnp.zeros(3)).compile()


def enter():
    """The folder inside, and JAX's setting there."""
    with compilation_cache() as folder:
        return folder, jax.config.values["jax_compilation_cache_dir"]


def refused(message):
    with pytest.warns(UserWarning, match=f"compiled programs are not cached: .*{message}"):
        assert enter() == (None, None)


def test_programs_compiled_inside_are_kept_and_others_are_not(cache):
    with compilation_cache() as folder:
        assert folder == cache
        compile_program(1)
    kept = set(cache.iterdir())
    assert kept
    assert cache.stat().st_mode & 0o777 == 0o700
    compile_program(2)
    assert set(cache.iterdir()) == kept


def test_a_cache_chosen_afterwards_is_the_users(cache, tmp_path):
    with compilation_cache():
        compile_program(3)
    kept = set(cache.iterdir())
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    try:
        compile_program(4)
        assert list((tmp_path / "own").iterdir())
        assert set(cache.iterdir()) == kept
    finally:
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_the_users_choice_is_left_alone(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with compilation_cache() as folder:
        assert folder is None
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    with compilation_cache() as folder:
        assert folder is None
    assert not cache.exists()


def test_a_choice_made_meanwhile_is_left_alone(cache, tmp_path):
    own = str(tmp_path / "own")
    with compilation_cache():
        jax.config.update("jax_compilation_cache_dir", own)
        assert enter() == (cache, own)
    assert jax.config.values["jax_compilation_cache_dir"] == own


def test_the_last_one_out_takes_it_back(cache):
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with compilation_cache():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    other.start()
    assert inside.wait(60)
    with compilation_cache() as folder:
        assert folder == cache
    assert jax.config.values["jax_compilation_cache_dir"] == str(cache)
    leave.set()
    other.join()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_threads_that_begin_to_compile_at_once_have_one_cache(cache, monkeypatch):
    place, folders = Place(), []
    module = importlib.import_module("jaxspec.engine.device.compilation_cache")
    monkeypatch.setattr(module, "_folder", place.watched(module._folder))

    def compile_something():
        with compilation_cache() as folder:
            folders.append(folder)
            while len(folders) < 2:
                time.sleep(0.001)

    assert at_once(compile_something, compile_something) == []
    assert (folders, place.visits) == ([cache] * 2, 1)


def test_an_error_inside_takes_it_back(cache):
    with pytest.raises(KeyError), compilation_cache():
        raise KeyError
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_folder_that_others_write_to_is_not_used(cache):
    cache.mkdir()
    cache.chmod(0o770)
    refused("other users can write into it")
    assert cache.stat().st_mode & 0o777 == 0o770


def test_another_users_folder_is_not_used(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
    refused("belongs to another user")


def test_a_link_is_not_followed(cache, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir(mode=0o755)
    cache.symlink_to(linked)
    refused("is a symbolic link")
    assert linked.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_made_is_done_without(cache):
    cache.parent.chmod(0o700)
    cache.write_text("a file")
    refused("File exists")
