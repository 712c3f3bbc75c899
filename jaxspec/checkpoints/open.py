"""One door for every source of weights."""

from pathlib import Path

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.hf_folder import open_hf_folder


def open_checkpoint(source: str | Path, file: str | None = None, sha256: str | None = None) -> Checkpoint:
    path = Path(source).expanduser()
    if path.is_dir():
        return open_hf_folder(path)
    if path.is_file():
        from jaxspec.checkpoints.gguf_file import open_gguf

        return open_gguf(path)
    raise CheckpointError(f"{source}: no such file or folder")
