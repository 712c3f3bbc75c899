"""The record of a run's settings, in a file beside its output."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def record_path(output: Path) -> Path:
    """The path of the record: beside the output itself if that is a link, such as /dev/stdout."""
    output = output.resolve()
    return output.with_name(f"{output.name}.run.json")


def read_record(output: Path) -> dict[str, Any]:
    """The record beside an output, with a dict "settings"; empty if there is no valid record."""
    try:
        record = json.loads(record_path(output).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_record = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    return record if is_record else {}


def write_record(output: Path, record: Mapping[str, Any]) -> None:
    """Replaces the record beside an output atomically.

    Raises:
      OSError: the record cannot be written.
    """
    path = record_path(output)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def describe_difference(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes how recorded settings differ from current ones: "temperature 0.0 and not 1.0".

    Args:
      begun, now: recorded and current settings, as JSON values.
    """
    parts = []
    # For another kind of drafter its other settings are not comparable.
    is_other_kind = begun.get("drafter.kind") != now.get("drafter.kind")
    for name in dict.fromkeys([*now, *begun]):
        before, after = begun.get(name), now.get(name)
        if before == after or (is_other_kind and name.startswith("drafter.") and name != "drafter.kind"):
            continue
        is_checkpoint = name.endswith("model") and before is not None and after is not None
        parts.append(
            f"another {name}" if is_checkpoint else f"{name} {_shown(before)} and not {_shown(after)}"
        )
    return ", ".join(parts)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
