"""Kernels that Numba keeps are compiled again when the source of any kernel changes."""

from pathlib import Path

import jaxspec_kernels
import pytest

numba_call = pytest.importorskip("jaxspec_kernels.calls.numba_call", reason="needs Numba")


def test_the_digest_of_sources_is_of_all_kernels(monkeypatch):
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    numba_call._sources.__wrapped__()
    assert read == sorted(Path(jaxspec_kernels.__file__).parent.rglob("*.py"))
