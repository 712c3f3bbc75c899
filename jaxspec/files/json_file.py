"""JSON files, with limits on size and depth, and errors that name the file."""

import json
import os
import re
from pathlib import Path
from typing import Any

from jaxspec.documents import levels
from jaxspec.files.errors import CheckpointError, reading

MAX_BYTES = 16 * 2**20
"""The largest file that is read, in bytes: twice the index of a checkpoint with 90,000 tensors."""
_MAX_VALUES = 500_000
_MAX_DEPTH = 64

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    path: Path,
    *,
    default: dict[str, Any] | None = None,
    max_bytes: int = MAX_BYTES,
    max_values: int = _MAX_VALUES,
) -> dict[str, Any]:
    """The object in the file; `default` if the file is missing and a default is given.

    Takes at most half a second and 50 MB, whatever the file holds, or three times as much if long texts have
    characters that Python stores in 32 bits, with the limits of bytes and values that stand here.

    Raises:
      CheckpointError: the file is missing, not a regular file, not JSON or not an object; it is larger,
        deeper or has more values than any such file; or a text in it is not valid Unicode.
    """
    content = read_bytes(path, max_bytes, missing_ok=default is not None)
    if content is None:
        assert default is not None
        return default
    # Counted before parsing: an empty object takes three bytes in the file and seventy in memory.
    if sum(map(content.count, b",:[{")) > max_values:
        raise CheckpointError(f"{path}: holds more than {max_values} values")
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    _check_depth(values, path)
    if _SURROGATE.search(content):
        _check_unicode(values, path)
    return values


def read_bytes(path: Path, limit: int, *, missing_ok: bool = False) -> bytes | None:
    """A regular file's content; None if it is missing and `missing_ok` is set.

    Raises:
      CheckpointError: missing, not a regular file, or larger than `limit` bytes.
    """
    with reading(path):
        if not path.exists():
            if missing_ok:
                return None
            raise CheckpointError(f"{path}: file not found")
        if not path.is_file():  # reading a pipe or a device might never end
            raise CheckpointError(f"{path}: not a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path}: larger than {limit} bytes")
            return file.read(size)


def _check_depth(values: dict[str, Any], path: Path) -> None:
    if any(depth >= _MAX_DEPTH for depth, _ in enumerate(levels(values))):
        raise CheckpointError(f"{path}: nested deeper than {_MAX_DEPTH} levels")


def _check_unicode(values: dict[str, Any], path: Path) -> None:
    texts = (t for level in levels({"": values}) for v in level for t in (v if isinstance(v, dict) else (v,)))
    try:
        for text in texts:
            if isinstance(text, str):
                text.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: not valid Unicode: a lone surrogate in a text") from None
