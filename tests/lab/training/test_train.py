"""The loop around the trainer."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.lab.training import train
from jaxspec.lab.training.config import TrainConfig
from jaxspec.lab.training.loss import StepSums
from jaxspec.lab.training.metrics import MetricsFile


class Batches:
    """Stands for the loader."""

    count = 0

    def __next__(self):
        self.count += 1
        return self.count

    def get_state(self):
        return self.count


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, monkeypatch):
    """Such a run went on to its end, exported a head of NaN and exited with 0."""
    monkeypatch.setattr(train, "can_plot", lambda: False)
    losses = iter([4.0, 3.0, np.nan, np.nan])

    def update(state, rows):
        ones = np.ones(2, np.float32)
        return state, StepSums(loss=next(losses) * ones, overlap=ones, correct=ones, count=ones)

    trainer = SimpleNamespace(
        config=TrainConfig(steps=4, batch_size=1, row_length=16, warmup_steps=0, checkpoint_every=2),
        put=lambda rows: rows,
        update=update,
        schedule=lambda step: 1.0,
    )
    saved = []
    checkpoints = SimpleNamespace(save=lambda state, data: saved.append(data))
    metrics, state = MetricsFile(tmp_path / "metrics.jsonl"), SimpleNamespace(step=0)
    with pytest.raises(
        ConfigError, match=r"loss is not finite after 4 updates; train\.learning_rate 0\.0005"
    ):
        train._loop(trainer, state, Batches(), [], checkpoints, metrics, tmp_path / "plot.png")
    assert saved == [2]
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [2, 4]
