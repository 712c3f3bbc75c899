import os
import stat

import pytest
from jaxspec_kernels.calls import ptxas
from jaxspec_kernels.calls.ptxas import Ptxas, find_ptxas

SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then
    echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'
    echo 'Cuda compilation tools, release {version}, V{version}.88'
    exit
fi
case "$1" in -arch=sm_90a) ;; *) exit 1 ;; esac
grep -q '^.version {ptx}$' "$2" && grep -q '^.target sm_90a$' "$2"
"""


@pytest.fixture
def make_ptxas(tmp_path, monkeypatch):
    """Puts a `ptxas` that compiles for sm_90a, or what else its script says, into a new folder of PATH."""
    folders = []

    def make(folder, version="13.0", ptx="9.0", script=SCRIPT):
        path = tmp_path / folder / "ptxas"
        path.parent.mkdir()
        path.write_text(script.format(version=version, ptx=ptx))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        folders.append(str(path.parent))
        monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/usr/bin", "/bin"]))
        return path

    return make


@pytest.mark.parametrize(
    ("cuda", "ptx"), [("12.0", 80), ("12.5", 85), ("12.6", 85), ("12.9", 88), ("13.0", 90), ("13.5", 95)]
)
def test_ptx_of_a_cuda_version(cuda, ptx, tmp_path):
    assert Ptxas(tmp_path, cuda).ptx_version == ptx


def test_the_first_of_path_that_tells_its_version_is_found(make_ptxas):
    make_ptxas("broken", script="#!/bin/sh\nexit 1\n")
    make_ptxas("silent", script="#!/bin/sh\necho hello\n")
    path = make_ptxas("first", version="12.9")
    make_ptxas("second")
    assert find_ptxas() == Ptxas(path, "12.9")


def test_a_toolkit_comes_before_the_wheels_of_either_cuda(tmp_path, monkeypatch):
    def find_spec(name):
        return type("Spec", (), {"origin": str(tmp_path / name / "__init__.py")})

    monkeypatch.setattr(ptxas.importlib.util, "find_spec", find_spec)
    assert [str(folder) for folder in ptxas._folders("/a:/b")] == [
        "/a",
        "/b",
        "/usr/local/cuda/bin",
        "/opt/cuda/bin",
        str(tmp_path / "nvidia" / "cu13" / "bin"),
        str(tmp_path / "nvidia" / "cuda_nvcc" / "bin"),
    ]


def test_it_compiles_for_the_architectures_that_it_knows(make_ptxas):
    make_ptxas("here")
    found = find_ptxas()
    assert found is not None
    assert found.compiles_for("sm_90a")
    assert not found.compiles_for("sm_100a")
