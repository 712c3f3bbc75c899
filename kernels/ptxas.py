"""Which `ptxas` turns Triton's PTX into machine code, and which PTX it takes.

Triton writes PTX of the newest version that the `ptxas` in its own wheel takes; jaxlib then looks for a
`ptxas` elsewhere, and an older one refuses that version.
Source: jaxlib/gpu/triton_kernels.cc and, in XLA, stream_executor/cuda/subprocess_compilation.cc.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_VERSION = re.compile(r"\bV(\d+)\.(\d+)\.\d+\b")


def find_ptxas() -> tuple[Path, str] | None:
    """The `ptxas` that jaxlib will run, and its CUDA version as "13.0"; None where there is none."""
    return _find(os.environ.get("PATH", ""))


@cache
def _find(path: str) -> tuple[Path, str] | None:
    for ptxas in (folder / "ptxas" for folder in _folders(path)):
        if ptxas.is_file() and (version := _version(ptxas)):
            return ptxas, version
    return None


def _folders(path: str) -> Iterator[Path]:
    """Where jaxlib looks, in its order."""
    yield from map(Path, path.split(os.pathsep))
    yield from (Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin"))
    for plugin, toolkit in (("jax_cuda13_plugin", "cu13"), ("jax_cuda12_plugin", "cuda_nvcc")):
        spec = importlib.util.find_spec(plugin)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parents[1] / "nvidia" / toolkit / "bin"


def _version(ptxas: Path) -> str | None:
    try:
        told = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(told.stdout)
    return f"{found[1]}.{found[2]}" if found else None
