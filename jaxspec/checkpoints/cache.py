"""Where downloaded files are kept, and how they are told to be whole."""

import hashlib
import os
import re
from pathlib import Path

from jaxspec.checkpoints.errors import CheckpointError


def cache_folder() -> Path:
    """`$JAXSPEC_CACHE`, else `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    if folder := os.environ.get("JAXSPEC_CACHE"):
        return home_path(folder)
    return home_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxspec"


def home_path(path: str | Path) -> Path:
    """A path whose "~" is written out.

    Raises:
      CheckpointError: nobody knows whose home it is.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from None


def private_folder(folder: Path) -> None:
    """Makes a folder that only this user can read or write, or makes sure of one that is there.

    What is asked and changed is the opened folder itself: no link is followed, and nothing can be put in
    its place in between.

    Raises:
      CheckpointError: it belongs to another user, others can write into it, or it is a symbolic link.
      OSError: it cannot be made or opened.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a symbolic link")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise CheckpointError(f"{folder}: belongs to another user")
        if status.st_mode & 0o022:
            raise CheckpointError(f"{folder}: other users can write into it")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


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
