"""Kernels compiled by Numba: registered with XLA once, and kept where that is possible."""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba")

from jaxspec_kernels.calls import kernel_cache, numba_call
from numba import types
from numba.core import config


def test_threads_that_ask_at_once_wait_for_one_registration():
    made = []

    @numba_call.once
    def target(rows: int) -> str:
        time.sleep(0.05)
        made.append(rows)
        return f"kernel_{rows}"

    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(target, [1, 1, 2, 1]))
    assert names == ["kernel_1", "kernel_1", "kernel_2", "kernel_1"]
    assert sorted(made) == [1, 2]


def compiled():
    def twice(x):
        return 2 * x

    return numba_call._compile(types.int64(types.int64), twice, set()).ctypes(21)


def test_they_are_kept_in_the_folder_of_the_program_around(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "find_folder", lambda: tmp_path / "ours")
    monkeypatch.setattr(config, "CACHE_DIR", "")
    assert compiled() == 42
    assert list(tmp_path.glob("ours/*/*.nbc"))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "the user's"))
    assert compiled() == 42
    assert list(tmp_path.glob("the user's/*/*.nbc"))


def test_without_a_place_for_them_they_are_compiled(monkeypatch):
    def read_only(**options):
        raise OSError("Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert compiled() == 42


def test_numba_compiles_them_also_where_it_is_told_not_to(tmp_path):
    """With a cold cache, since nothing is compiled with a warm one."""
    done = subprocess.run(
        [sys.executable, "-c", "from jaxspec_kernels.calls import numba_call; numba_call._register_task()"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*/*.nbc"))


def test_a_closure_is_loaded_under_its_name(tmp_path, monkeypatch):
    """What it refers to is made anew in every process."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def compiled(name, factor):
        address_at = numba_call._pointer_to(types.int64)

        def times(x):
            return factor * x if x else address_at(x)[0]

        times.__name__ = name
        return numba_call._compile(types.int64(types.int64), times, set())

    first, again, other = compiled("twice", 2), compiled("twice", 2), compiled("thrice", 3)
    assert [kernel._cache_hits for kernel in (first, again, other)] == [0, 1, 0]
    assert [kernel.ctypes(7) for kernel in (first, again, other)] == [14, 14, 21]
