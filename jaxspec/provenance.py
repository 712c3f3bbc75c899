"""The provenance of results: what is needed to reproduce them."""

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxspec.installation import distribution
from jaxspec.jax_settings import choose_devices

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-triton", "triton")


def provenance(command: str, folder: Path, *, devices: str | None = None) -> dict[str, Any]:
    """Command, git revision, versions and device, as JSON values.

    Args:
      command: the command line.
      folder: the script's folder, for the git revision.
      devices: the device, if other processes computed; None for that of this process.
    """
    return {
        "command": command,
        "git_revision": git_revision(folder),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": device() if devices is None else devices,
    }


def git_revision(folder: Path) -> str | None:
    """The commit checked out around a folder, with "-dirty" if files differ; None outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def device(devices: Sequence[jax.Device] = ()) -> str:
    """The number and kind of devices, as text; by default of all that this process has of its platform."""
    devices = devices or choose_devices()
    if devices[0].platform == "cpu":
        return f"{len(devices)} x CPU ({platform.machine()})"
    return f"{len(devices)} x {devices[0].device_kind}"


def _versions() -> dict[str, str]:
    installed = distribution()
    found = {} if installed is None else {"jaxspec": installed.version}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
