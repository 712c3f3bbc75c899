"""Repositories of the Hugging Face Hub, downloaded to the Hub's own cache folder."""

import re
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.gguf_parts import parts_of

FILES = ("*.json", "*.safetensors", "*.jinja")
"""The files to download from a repository: no pickles, no code."""


def is_hub_id(source: str) -> bool:
    """Whether a source has the form "organisation/name", perhaps with "@revision"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", source) is not None


def hub_folder(repository: str, file: str | None = None, *, progress: bool = True) -> Path:
    """The local folder of a repository; downloads the files that are missing.

    Honours `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the other variables of `huggingface_hub`.

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
            # Subfolders, and Mistral's consolidated files, hold the same weights in other formats.
            ignore_patterns=None if file else ["*/*", "consolidated*"],
            tqdm_class=None if progress and sys.stderr is not None else _SilentBar,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{repository!r} is neither a local path nor a Hub repository within reach: {reason}"
        ) from None
    return Path(folder)


class _SilentBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})
