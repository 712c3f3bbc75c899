"""Metrics of a training run: a JSONL file, and its plot."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.training.stage_folder import write_atomically


class MetricsFile:
    """One JSON object per line, each with its "step"."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """Everything written so far."""
        if not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]

    def cut(self, step: int) -> None:
        """Forgets what was written after `step`, which a resumed run does again."""
        kept = [json.dumps(row) + "\n" for row in self._whole_rows() if row["step"] <= step]
        write_atomically(self.path, "".join(kept).encode())

    def append(self, **row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _whole_rows(self) -> list[dict[str, Any]]:
        """The rows, without a last one that an interruption cut."""
        if not self.path.is_file():
            return []
        whole = self.path.read_text("utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


def expected_length(rates: list[float]) -> float:
    """Tokens a step, the target's own included, if the draft at position k passes at rate k behind others."""
    return 1 + float(np.cumprod(rates).sum())


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def plot_progress(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws, as PNG, what validation says against tokens seen: accuracy per draft position, with that of
    training thin, and the acceptance length to be expected of it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    # Not pyplot's: which backend that has is the caller's business.
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    num_steps = len(rows[0]["accuracy"]) if rows else 0
    colours = colormaps["viridis"]
    for k in range(num_steps):
        colour = colours(k / max(num_steps, 1))
        for kind, width, alpha in (("train", 0.8, 0.35), ("validation", 2.0, 1.0)):
            points = [(row["tokens"], row["accuracy"][k]) for row in rows if row["kind"] == kind]
            label = f"position {k}" if kind == "validation" else None
            if points:
                left.plot(*zip(*points, strict=True), color=colour, linewidth=width, alpha=alpha, label=label)
    left.set_ylabel("accuracy (teacher-forced)")
    left.set_ylim(0, 1)
    # Of few conversations none is left for validation.
    shown = "validation" if any(row["kind"] == "validation" for row in rows) else "train"
    for rates, label in (("accuracy", "temperature 0"), ("overlap", "temperature 1")):
        lengths = [(row["tokens"], expected_length(row[rates])) for row in rows if row["kind"] == shown]
        if lengths:
            right.plot(*zip(*lengths, strict=True), marker="o", label=label)
    right.set_ylabel(f"expected acceptance length, K = {num_steps}")
    for axes in (left, right):
        axes.set_xlabel("tokens seen (packed rows, prompts included)")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(title=shown, fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
