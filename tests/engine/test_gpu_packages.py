import importlib.metadata
import tomllib
import types
from pathlib import Path

import pytest

import jaxspec
from jaxspec.engine.api import gpu_packages
from jaxspec.engine.api.gpu_packages import check_gpu_packages

PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text("utf-8"))["project"]
INSTALLED = {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.9.0"}


class FakePtxas:
    path = "/toolkit/bin/ptxas"
    version = "12.2"

    def __init__(self, *architectures):
        self.architectures = architectures

    def compiles_for(self, architecture):
        return architecture in self.architectures


HOPPERS = FakePtxas("sm_90a")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Pretends that jax runs on an H200 with the packages that the extras ask for, or others."""

    def pretend(ptxas=HOPPERS, capability="9.0", missing=(), **versions):
        installed = INSTALLED | {name.replace("_", "-"): version for name, version in versions.items()}
        extras = PROJECT["optional-dependencies"]
        lines = [f"{line}; extra == '{extra}'" for extra in extras for line in extras[extra]]
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(gpu_packages, "platform", lambda: "gpu")
        monkeypatch.setattr(gpu_packages, "default_device", lambda: device)
        monkeypatch.setattr(gpu_packages, "find_spec", lambda name: None if name in missing else name)
        monkeypatch.setattr(gpu_packages, "find_ptxas", lambda: ptxas)
        installed_as = types.SimpleNamespace(requires=[*PROJECT["dependencies"], *lines])
        monkeypatch.setattr(gpu_packages, "distribution", lambda: installed_as)
        monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)

    return pretend


def test_what_the_extras_install_is_accepted(on_a_gpu):
    on_a_gpu()
    check_gpu_packages()


@pytest.mark.parametrize(
    ("package", "version", "command"),
    [
        ("jax", "0.11.0", r"pip install 'jax<0\.13,>=0\.12'"),
        ("jax", "0.13.0", r"pip install 'jax<0\.13,>=0\.12'"),
        ("jax_triton", "0.3.1", r"pip install 'jax-triton<0\.5,>=0\.4\.1'"),
        ("triton", "3.6.0", r"pip install 'triton<3\.10,>=3\.9'"),
        ("triton", "3.10.0", r"pip install 'triton<3\.10,>=3\.9'"),
    ],
)
def test_a_version_that_was_not_run_is_refused_before_weights_are_read(
    on_a_gpu, tiny_engines, package, version, command
):
    on_a_gpu(**{package: version})
    expected = rf"^{package.replace('_', '-')} {version} cannot run the GPU kernels.*{command}$"
    with pytest.raises(jaxspec.ConfigError, match=expected):
        jaxspec.load(tiny_engines.folders["target"], progress=False)


def test_a_ptxas_too_old_for_the_gpu_is_refused(on_a_gpu):
    on_a_gpu(capability="10.0")
    expected = r"^/toolkit/bin/ptxas of CUDA 12\.2 does not compile for this GPU, sm_100a: .*PATH"
    with pytest.raises(jaxspec.ConfigError, match=expected):
        check_gpu_packages()


def test_a_gpu_without_accelerated_features_has_no_suffix(on_a_gpu):
    on_a_gpu(FakePtxas("sm_89"), capability="8.9")
    check_gpu_packages()


def test_no_ptxas_at_all_is_refused(on_a_gpu):
    on_a_gpu(None)
    with pytest.raises(jaxspec.ConfigError, match=r"^there is no ptxas .* pip install nvidia-cuda-nvcc"):
        check_gpu_packages()


@pytest.mark.parametrize("missing", ["jax_triton", "triton"])
def test_without_the_kernels_nothing_is_asked_of_them(on_a_gpu, missing):
    on_a_gpu(None, missing=[missing], jax="0.11.0")
    check_gpu_packages()


def test_a_jaxspec_that_is_not_installed_has_no_bounds(on_a_gpu, monkeypatch):
    on_a_gpu(triton="3.6.0")
    monkeypatch.setattr(gpu_packages, "distribution", lambda: None)
    check_gpu_packages()
