"""Finds the `ptxas` that turns Triton's PTX into machine code.

Triton writes PTX in the newest version that the `ptxas` in its own wheel accepts. jaxlib runs another
`ptxas`, which may be older and reject that version.
Source: jaxlib/gpu/triton_kernels.cc and, in XLA, stream_executor/cuda/subprocess_compilation.cc.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_PROGRAM = ".version {}.{}\n.target {}\n.address_size 64\n.visible .entry nothing() {{ ret; }}\n"


@dataclass(frozen=True)
class Ptxas:
    """A `ptxas` and its CUDA version, for example "13.0"."""

    path: Path
    version: str

    @property
    def ptx_version(self) -> int:
        """The newest version of PTX that it accepts, as 90 for 9.0."""
        major, minor = map(int, self.version.split("."))
        # CUDA 12.5 and 12.6 both have PTX 8.5; from 13.0 on, the minor versions agree again.
        return 10 * major - 40 + minor - (major == 12 and minor > 5)

    def compiles_for(self, architecture: str) -> bool:
        """Whether it can compile for an architecture such as "sm_90a"."""
        with TemporaryDirectory() as folder:
            source = Path(folder, "nothing.ptx")
            source.write_text(_PROGRAM.format(*divmod(self.ptx_version, 10), architecture))
            command = [self.path, f"-arch={architecture}", source, "-o", Path(folder, "nothing.cubin")]
            return subprocess.run(list(map(str, command)), capture_output=True, check=False).returncode == 0


def find_ptxas() -> Ptxas | None:
    """The `ptxas` that jaxlib will run; None if there is none."""
    return _first(os.environ.get("PATH", ""))


@cache
def _first(path: str) -> Ptxas | None:
    return next((found for folder in _folders(path) if (found := _ptxas(folder / "ptxas"))), None)


def _folders(path: str) -> Iterator[Path]:
    """The folders that jaxlib searches, in its order: installed toolkits before those in Python wheels."""
    yield from map(Path, path.split(os.pathsep))
    yield from (Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin"))
    for plugin, toolkit in (("jax_cuda13_plugin", "cu13"), ("jax_cuda12_plugin", "cuda_nvcc")):
        spec = importlib.util.find_spec(plugin)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parents[1] / "nvidia" / toolkit / "bin"


def _ptxas(path: Path) -> Ptxas | None:
    if not path.is_file():
        return None
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+\.\d+)\.\d+\b", told)
    return Ptxas(path, found[1]) if found else None
