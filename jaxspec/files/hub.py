"""Repositories of the Hugging Face Hub, downloaded to the Hub's own cache folder."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from jaxspec.files.cache import cache_folder
from jaxspec.files.errors import CheckpointError
from jaxspec.files.gguf.parts import parts_of

FILES = (
    *("*.json", "*.safetensors", "*.jinja"),
    *("tokenizer.model", "tiktoken.model", "spiece.model", "vocab.txt", "merges.txt"),
)
"""The files to download from a repository: no pickles, no code."""

# Subfolders, and Mistral's consolidated files, hold the same weights in other formats; a subfolder may also
# hold chat templates, which are wanted.
_IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")


def is_hub_id(source: str) -> bool:
    """Whether a source has the form "organisation/name", perhaps with "@revision"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", source) is not None


def hub_folder(repository: str, file: str | None = None, *, progress: bool = True) -> Path:
    """The local folder of a repository; downloads the files that are missing.

    Honours `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the other variables of `huggingface_hub`. If only
    `JAXSPEC_CACHE` is set, the files go there.

    Args:
      repository: "organisation/name", perhaps with "@revision".
      file: downloads only this file, such as a GGUF, and all of its parts if it is split.
      progress: shows progress bars.

    Raises:
      CheckpointError: the repository does not exist or cannot be reached.
    """
    import huggingface_hub  # imports slowly

    name, _, revision = repository.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=parts_of(file) if file else list(FILES),
            ignore_patterns=None if file else list(_IGNORED),
            cache_dir=_cache_dir(),
            tqdm_class=None if progress and sys.stderr is not None else _SilentBar,
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC):
            raise CheckpointError(
                f"cannot write {error.filename or 'the cache'}: {error.strerror}; set JAXSPEC_CACHE to a "
                "folder that can be written"
            ) from None
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{repository!r} is neither a local path nor a Hub repository within reach: {reason}"
        ) from None
    return Path(folder)


def _cache_dir() -> Path | None:
    """The folder for downloads; None for that of `huggingface_hub`."""
    chosen = any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    return cache_folder() / "hub" if os.environ.get("JAXSPEC_CACHE") and not chosen else None


class _SilentBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})
