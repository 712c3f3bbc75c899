"""JSON objects on disk, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.errors import CheckpointError


def read_json(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in the file; `default` where the file is missing and one is given.

    Raises:
      CheckpointError: missing, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if default is not None:
            return default
        raise CheckpointError(f"{path}: file not found") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
