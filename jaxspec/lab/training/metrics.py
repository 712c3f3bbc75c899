"""Metrics of a training run: a JSONL file and its plot."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.lab.training.stage_folder import write_atomically


class MetricsFile:
    """One JSON object per line, each with its "step"."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All rows written so far."""
        if not self.path.is_file():
            return []
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]

    def cut(self, step: int) -> None:
        """Removes rows after `step`, which a resumed run writes again."""
        kept = [json.dumps(row) + "\n" for row in self._whole_rows() if row["step"] <= step]
        write_atomically(self.path, "".join(kept).encode())

    def append(self, **row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _whole_rows(self) -> list[dict[str, Any]]:
        """The rows, without an incomplete last one."""
        if not self.path.is_file():
            return []
        whole = self.path.read_text("utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


def expected_length(rates: list[float]) -> float:
    """Mean tokens per step, with the target's own, if draft k is accepted at rate k once those before are."""
    return 1 + float(np.cumprod(rates).sum())


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_progress(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots metrics against the number of tokens seen, as PNG: the accuracy per draft position (training as
    thin lines), and the expected acceptance length."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    # Without pyplot, whose backend belongs to the caller.
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
    # Small data sets have no validation rows.
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
