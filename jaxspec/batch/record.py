"""What a run was begun with, in a file beside its output."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def record_path(output: Path) -> Path:
    """The output's name with ".run.json" behind."""
    return output.with_name(f"{output.name}.run.json")


def read_record(output: Path) -> dict[str, Any]:
    """The record beside an output: a dict whose "settings" is one; empty where there is none."""
    try:
        record = json.loads(record_path(output).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_record = isinstance(record, dict) and isinstance(record.get("settings"), dict)
    return record if is_record else {}


def write_record(output: Path, record: Mapping[str, Any]) -> None:
    """Puts a record beside an output; at every moment there is the old one or the new one, whole.

    Raises:
      OSError: it cannot be written.
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
    """Names what a run was begun with and would go on with otherwise: "temperature 0.0 and not 1.0".

    Args:
      begun, now: settings, ready for JSON.
    """
    parts = []
    # Of another kind of drafter the other settings say nothing more.
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
