"""The folder of downloaded files, and checks of its permissions and of hashes."""

import hashlib
import os
import re
from pathlib import Path

from jaxspec.files.errors import CheckpointError


def cache_folder() -> Path:
    """`$JAXSPEC_CACHE`, else `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    if folder := os.environ.get("JAXSPEC_CACHE"):
        return home_path(folder)
    return home_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxspec"


def home_path(path: str | Path) -> Path:
    """The path with "~" expanded.

    Raises:
      CheckpointError: the home folder cannot be determined.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from None


def private_folder(folder: Path, *, is_readable: bool = False) -> None:
    """Creates a folder that only this user can read or write, or checks and restricts an existing one.

    With `is_readable`, others may read what the umask lets them read.

    The checks and changes use the descriptor of the opened folder: no link is followed, and the folder cannot
    be replaced in between.

    Raises:
      CheckpointError: it belongs to another user, others can write to it, or it is a symbolic link.
      OSError: it cannot be created or opened.
    """
    folder.mkdir(mode=0o755 if is_readable else 0o700, parents=True, exist_ok=True)
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
        if not is_readable and status.st_mode & 0o777 != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal, at about 1.5 GB per second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file with its pinned hash.

    Raises:
      CheckpointError: the pinned hash is malformed, or the file has another hash.
    """
    check_pin(expected)
    actual = file_sha256(path)
    if actual != expected.lower():
        raise CheckpointError(f"{path}: sha256 is {actual}, expected {expected}")


def check_pin(sha256: str) -> None:
    """Checks the form of a pinned hash.

    Raises:
      CheckpointError: not 64 hexadecimal digits.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise CheckpointError(f"sha256 must be 64 hexadecimal digits, got {sha256!r}")
