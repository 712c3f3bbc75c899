"""The folder of one stage, with a manifest of its settings, and whether it is finished."""

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError

MANIFEST = "stage.json"
_PART = f"{MANIFEST}.part"
STAGES = ("prompts", "responses", "vocabulary", "train", "evaluate", "export")


class StageFolder:
    """The folder of a stage inside a run's output folder.

    Attributes:
      path: the folder.
      is_done: whether the stage is finished and the folder complete.
      results: the results of the finished stage.
    """

    def __init__(self, output: Path, stage: str, settings: dict[str, Any]):
        """Opens or creates the folder.

        Args:
          output: the run's folder.
          stage: one of `STAGES`.
          settings: the settings on which the stage's content depends, as JSON values.

        Raises:
          ConfigError: the output folder holds something else, or the stage was begun with other settings;
            nothing is written then.
        """
        check_output(output)
        self.path = output / stage
        self._stage, self._settings = stage, settings
        manifest = self._read(output)
        self.is_done = bool(manifest.get("done"))
        self.results: dict[str, Any] = manifest.get("results", {})
        if not manifest:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(done=False)

    def finish(self, **results: Any) -> None:
        """Marks the stage as done."""
        self.is_done, self.results = True, results
        self._write(done=True)

    @staticmethod
    def read_manifest(path: Path) -> dict[str, Any]:
        """The manifest in a stage's folder.

        Raises:
          ConfigError: it is none.
        """
        try:
            return json.loads((path / MANIFEST).read_text("utf-8"))
        except ValueError:
            raise ConfigError(f"{path / MANIFEST}: not a stage's manifest; give another --output") from None

    def _read(self, output: Path) -> dict[str, Any]:
        path = self.path / MANIFEST
        if not path.is_file():
            if self.path.is_dir() and not _is_bare(self.path):
                raise ConfigError(f"{self.path}: holds files that no run of this program wrote")
            return {}
        manifest = self.read_manifest(self.path)
        if not manifest.get("done") and len(list(self.path.iterdir())) == 1:
            return {}  # the stage failed before it wrote anything
        if (different := _difference(manifest, self._settings)) is not None:
            raise ConfigError(
                f"{output}: the stage {self._stage!r} there belongs to another run: {different}; "
                "give another --output"
            )
        return manifest

    def _write(self, *, done: bool) -> None:
        content = {"stage": self._stage, "done": done, "settings": self._settings, "results": self.results}
        write_atomically(self.path / MANIFEST, json.dumps(content, indent=2).encode())


def set_aside(output: Path, stages: dict[str, dict[str, Any]]) -> list[str]:
    """Renames the folder of the first stage that was begun with other settings, and those of all after it.

    Args:
      output: the run's folder.
      stages: the stages that may be begun anew, in order, with their settings.

    Returns:
      A line for each renamed folder.
    """
    lines: list[str] = []
    for stage, settings in stages.items():
        path = output / stage
        if not (path / MANIFEST).is_file():
            continue
        manifest = StageFolder.read_manifest(path)
        different = "it follows from that" if lines else _difference(manifest, settings)
        if different is None:
            continue
        number = next(n for n in count(1) if not (output / f"{stage}.{n}").exists())
        kept = path.rename(output / f"{stage}.{number}")
        lines.append(f"{stage}: begins anew, as {different}; what was there is kept in {kept}")
    return lines


def has_stages(output: Path) -> bool:
    """Whether a folder holds a stage of a training run."""
    return any((output / stage / MANIFEST).is_file() for stage in STAGES)


def holds_a_run(output: Path) -> bool:
    """Whether any stage is finished, or its folder holds more than a manifest."""
    folders = [output / stage for stage in STAGES if (output / stage).is_dir()]
    paths = [path for folder in folders for path in folder.iterdir() if path.name != _PART]
    return any(path.name != MANIFEST or _is_done(path) for path in paths)


def _is_bare(folder: Path) -> bool:
    """Whether a folder holds at most what a run leaves that ended while it wrote the first manifest."""
    return folder.is_dir() and all(path.name == _PART for path in folder.iterdir())


def _is_done(manifest: Path) -> bool:
    try:
        return bool(json.loads(manifest.read_text("utf-8")).get("done"))
    except (OSError, ValueError):
        return True  # opening the stage will report the problem


def check_output(output: Path) -> None:
    """Checks that an output folder is empty or belongs to a training run.

    Raises:
      ConfigError: it is a file, or holds something else.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output}: is a file; --output needs a folder")
    if not output.is_dir() or has_stages(output):
        return
    if not set(output.iterdir()) <= set(filter(_is_bare, (output / stage for stage in STAGES))):
        raise ConfigError(f"{output}: not empty, and not the output of a training run; nothing was written")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _difference(manifest: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """The first key whose value in the manifest is another, in words; None if all are the same."""
    theirs, ours = _flat(manifest.get("settings", {})), _flat(settings)
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if not different:
        return None
    key = different[0]
    return f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
