"""Where a result comes from: what a reader needs to get it again."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jaxspec", "jax", "jaxlib", "flax", "numpy", "jax-triton", "triton")


def provenance(command: str, folder: Path, *, devices: str | None = None) -> dict[str, Any]:
    """Command, revision, versions and device, ready for JSON.

    Args:
      command: what was run.
      folder: of the script; its git revision is reported.
      devices: what other processes computed on; None for what this one does.
    """
    return {
        "command": command,
        "git_revision": git_revision(folder),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": device() if devices is None else devices,
    }


def git_revision(folder: Path) -> str | None:
    """The commit checked out around a folder, with "-dirty" where files differ; None outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def device() -> str:
    """What JAX computes on."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{len(devices)} x CPU ({platform.machine()})"
    return f"{len(devices)} x {devices[0].device_kind}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
