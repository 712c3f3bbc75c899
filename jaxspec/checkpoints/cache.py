"""Where downloaded files are kept, and how they are told to be whole."""

import hashlib
import os
import re
from pathlib import Path

from jaxspec.checkpoints.errors import CheckpointError


def cache_folder() -> Path:
    """`$JAXSPEC_CACHE`, else `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    if folder := os.environ.get("JAXSPEC_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def file_sha256(path: Path) -> str:
    """The file's hash in hexadecimal; a second reads about 1.5 GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file with its pinned hash.

    Raises:
      CheckpointError: the pin is malformed, or the file is another one.
    """
    check_pin(expected)
    actual = file_sha256(path)
    if actual != expected.lower():
        raise CheckpointError(f"{path}: sha256 is {actual}, expected {expected}")


def check_pin(sha256: str) -> None:
    """Refuses what cannot be a sha256.

    Raises:
      CheckpointError: not 64 hexadecimal digits.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise CheckpointError(f"sha256 must be 64 hexadecimal digits, got {sha256!r}")
