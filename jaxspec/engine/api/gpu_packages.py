"""Checks that the installed packages can run the Triton kernels, before weights are read."""

import importlib.metadata
from importlib.util import find_spec

from jaxspec_kernels.calls.ptxas import find_ptxas
from packaging.requirements import Requirement

from jaxspec.config import ConfigError
from jaxspec.installation import distribution
from jaxspec.jax_settings import default_device, platform


def check_gpu_packages() -> None:
    """Checks package versions and `ptxas`; does nothing without a GPU or without jax-triton.

    Raises:
      ConfigError: a package's version is outside what the extras allow, or no `ptxas` compiles for this GPU.
    """
    if platform() != "gpu" or find_spec("jax_triton") is None or find_spec("triton") is None:
        return
    for needed in _requirements():
        version = importlib.metadata.version(needed.name)
        if not needed.specifier.contains(version, prereleases=True):
            raise ConfigError(
                f"{needed.name} {version} cannot run the GPU kernels, which need Python 3.12 or later: "
                f"pip install '{needed.name}{needed.specifier}'"
            )
    ptxas = find_ptxas()
    if ptxas is None:
        raise ConfigError("there is no ptxas for the GPU kernels: pip install nvidia-cuda-nvcc")
    architecture = _architecture()
    if not ptxas.compiles_for(architecture):
        raise ConfigError(
            f"{ptxas.path} of CUDA {ptxas.version} does not compile for this GPU, {architecture}: "
            "put the folder of a newer ptxas first in PATH, for example that of the package nvidia-cuda-nvcc"
        )


def _requirements() -> list[Requirement]:
    """The requirements of jaxspec's GPU extras; none if jaxspec is not installed as a package."""
    installed = distribution()
    lines = installed.requires or [] if installed else []
    return [needed for needed in map(Requirement, lines) if "cuda" in str(needed.marker)]


def _architecture() -> str:
    """`ptxas`'s name of the architecture that Triton compiles for."""
    capability = default_device().compute_capability.replace(".", "")
    return f"sm_{capability}a" if int(capability) >= 90 else f"sm_{capability}"
