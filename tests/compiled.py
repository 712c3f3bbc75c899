"""The folder of compiled programs, kept for the user so that a second run of the tests is faster."""

import atexit
import shutil
import tempfile
import time
import zlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from jaxspec.files import CheckpointError
from jaxspec.files.cache import cache_folder, private_folder

MOST_BYTES = 2 << 30
"""Of one version of JAX; all tests write less than a quarter of it."""
MOST_SECONDS = 30 * 86_400
"""For which programs of another version are kept after the last was written."""


def compiled_folder() -> Path:
    """The folder for programs of this version of JAX in jaxspec's cache; a temporary one if there is none
    that is this user's alone and can be written."""
    try:
        root = cache_folder() / "tests"
        private_folder(root)
        folder = root / f"jax-{version('jax')}-{version('jaxlib')}"
        private_folder(folder)
        tidy(folder)
    except (CheckpointError, OSError):
        folder = Path(tempfile.mkdtemp(prefix="jaxspec-tests-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tidy(folder: Path) -> None:
    """Removes other versions that nobody uses any more, and programs: the oldest ones of a folder that is too
    large, and those that a process which was killed has half written, which JAX neither reads nor replaces.
    """
    for other in folder.parent.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > MOST_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    mark = folder / "tidied"
    checked = mark.stat().st_mtime if mark.exists() else 0
    mark.touch()
    size = 0
    programs = [(path.stat(), path) for path in folder.glob("*-cache")]
    for status, path in sorted(programs, key=lambda program: program[0].st_mtime, reverse=True):
        size += status.st_size
        if size > MOST_BYTES or (status.st_mtime >= checked and not _is_complete(path)):
            with suppress(FileNotFoundError):
                path.unlink()


def _is_complete(path: Path) -> bool:
    data = path.read_bytes()
    if data[:1] not in (b"", b"\x78"):
        return True  # compressed by zstd, if that is installed: left to JAX, which reports it
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True
