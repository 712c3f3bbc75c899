"""A whole run on a tiny target: it learns, it resumes bit for bit, and nothing half-done is used."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_run import write_run

from jaxspec.config import DrafterConfig
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.training import train as train_stage
from jaxspec.training.config import load_training_run
from jaxspec.training.pipeline import Pipeline
from jaxspec.training.stage_folder import STAGES
from jaxspec.training.token_rows import TokenRows

STEPS = 200


def pipeline(config: Path, output: Path) -> Pipeline:
    return Pipeline(load_training_run(config), output, data=config.parent)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, dict]:
    """The configuration, the output folder and the reports of a run from the first stage to the last."""
    folder = tmp_path_factory.mktemp("run")
    config = write_run(folder, train={"steps": STEPS, "checkpoint_every": 100, "validate_every": 100})
    run = pipeline(config, folder / "out")
    return config, folder / "out", {stage: run.run_stage(stage) for stage in STAGES}


def test_loss_falls_and_accuracy_rises(finished):
    _, output, _ = finished
    rows = [json.loads(line) for line in (output / "train" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert all(last < first / 2 for first, last in zip(trained[0]["loss"], trained[-1]["loss"], strict=True))
    assert rows[-1]["kind"] == "validation"
    assert min(rows[-1]["accuracy"]) > 0.5
    assert (output / "train" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_rises_above_the_untrained_heads(finished):
    config, output, reports = finished
    run = pipeline(config, output)
    engine = run._engine(128, run._new_head())
    prompts = TokenRows.load(output / "prompts" / "prompts.npz").sequences()[:4]
    untrained = engine.generate([p.tolist() for p in prompts], max_new_tokens=32)
    assert max(answer.stats.acceptance_length for answer in untrained) < 2
    assert reports["evaluate"]["acceptance_length"]["held_out.jsonl temperature 0"] > 3


def test_the_exported_head_generates_the_same_tokens(finished):
    config, output, reports = finished
    run = pipeline(config, output)
    trainer, state = train_stage.restore_head(run._new_head(), run.target, run.run.train, output / "train")
    prompts = [p.tolist() for p in TokenRows.load(output / "prompts" / "prompts.npz").sequences()[:3]]
    expected = run._engine(128, trainer.head(state)).generate(prompts, max_new_tokens=24)
    assert reports["export"]["formats"] == ["speculators", "shared", "safeailab"]
    form = output / "export" / "shared"
    drafter = DrafterConfig(kind="eagle3", num_speculative_tokens=4, source=str(form))
    read = run._engine(128, load_drafter(drafter, run.target, Build(16, np.dtype("float32"))))
    answers = read.generate(prompts, max_new_tokens=24)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
