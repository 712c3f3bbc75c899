"""A whole run on a tiny target: it learns, it resumes bit for bit, and its head comes back from disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import write_run

from jaxspec.config import DrafterConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.engine import Engine, Generation
from jaxspec.lab.training.config import load_training_run
from jaxspec.lab.training.evaluate import measure
from jaxspec.lab.training.metrics import MetricsFile
from jaxspec.lab.training.pipeline import Pipeline
from jaxspec.lab.training.stage_folder import STAGES
from jaxspec.lab.training.token_rows import TokenRows, read_shards
from jaxspec.lab.training.train import restore_head
from jaxspec.lab.training.trainer import Trainer

STEPS = 40


def pipeline(config: Path, output: Path) -> Pipeline:
    return Pipeline(load_training_run(config), output, data=config.parent)


def engine(run: Pipeline, head: Drafter) -> Engine:
    return Engine(
        run.target,
        head,
        tokenizer=None,
        eos_token_ids=(2,),
        config=run.run.engine,
        sampling_modes=("greedy",),
        progress=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, dict]:
    """The configuration, the output folder and the reports of a run from the first stage to the last."""
    folder = tmp_path_factory.mktemp("run")
    train = {
        "steps": STEPS,
        "checkpoint_every": 20,
        "validate_every": STEPS,
        "log_every": 3,
        "learning_rate": 2e-2,
    }
    config = write_run(folder, train=train)
    run = pipeline(config, folder / "out")
    return config, folder / "out", {stage: run.run_stage(stage) for stage in STAGES}


@pytest.fixture(scope="module")
def answers(finished) -> dict[str, list[Generation]]:
    """What three prompts are answered with the untrained, the trained and the exported head."""
    config, output, _ = finished
    run = pipeline(config, output)
    trainer, state = restore_head(run._new_head(), run.target, run.run.train, output / "train")
    source = str(output / "export" / "shared")
    exported = DrafterConfig(kind="eagle3", num_speculative_tokens=3, source=source)
    heads = {
        "untrained": run._new_head(),
        "trained": trainer.head(state),
        "exported": load_drafter(exported, run.target, Build(jnp.dtype(jnp.float32))),
    }
    prompts = [ids.tolist() for ids in TokenRows.load(output / "prompts" / "prompts.npz").sequences()[:3]]
    return {name: engine(run, head).generate(prompts, max_new_tokens=24) for name, head in heads.items()}


def test_loss_falls_and_accuracy_rises(finished):
    _, output, _ = finished
    rows = [json.loads(line) for line in (output / "train" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert all(
        last < first - 0.2 for first, last in zip(trained[0]["loss"], trained[-1]["loss"], strict=True)
    )
    assert rows[-1]["kind"] == "validation"
    assert min(rows[-1]["accuracy"]) > 0.5
    assert (output / "train" / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_rises_above_the_untrained_heads(answers):
    total = {name: sum(a.stats.accepted for a in given) for name, given in answers.items()}
    steps = {name: sum(a.stats.draft_steps for a in given) for name, given in answers.items()}
    assert total["untrained"] / steps["untrained"] < 0.5
    assert total["trained"] / steps["trained"] > 1


def test_the_exported_head_drafts_what_the_trained_one_does(finished, answers):
    """Of whatever head, the tokens are the target's; how many drafts each step accepts is the head's."""
    _, output, reports = finished
    assert reports["export"]["formats"] == ["speculators", "shared", "safeailab"]
    config = json.loads((output / "export" / "speculators" / "config.json").read_text("utf-8"))
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    tokens = {name: [a.token_ids for a in given] for name, given in answers.items()}
    assert tokens["exported"] == tokens["trained"] == tokens["untrained"]
    verified = {name: [a.verified for a in given] for name, given in answers.items()}
    assert verified["exported"] == verified["trained"] != verified["untrained"]


def test_the_evaluation_is_of_the_trained_head_and_of_what_it_is_to_beat(finished):
    config, output, reports = finished
    run = pipeline(config, output)
    name = "held_out.jsonl"
    prompts = {name: run._evaluation_prompts(name)}
    lengths = reports["evaluate"]["acceptance_length"]

    def measured(head):
        (found,) = measure(run._engine(128, head), prompts, run.run.evaluate).values()
        return found["acceptance_length"]

    trainer, state = run._trained()
    assert lengths[f"{name} temperature 0"] == measured(trainer.head(state)) > measured(run._new_head()) + 0.3
    assert lengths[f"before, {name} temperature 0"] == measured(run._baseline())


def test_answers_end_at_the_targets_end_token(finished):
    config, output, _ = finished
    run = pipeline(config, output)
    prompt = TokenRows.load(output / "prompts" / "prompts.npz").sequences()[0].tolist()
    (answer,) = run._engine(128).generate([prompt], max_new_tokens=20)
    end = answer.token_ids[5]
    run.checkpoint = replace(run.checkpoint, eos_token_ids=(end,))
    (ended,) = run._engine(128).generate([prompt], max_new_tokens=20)
    assert ended.token_ids == answer.token_ids[: answer.token_ids.index(end) + 1]
    assert ended.finish_reason == "stop"


def test_the_shared_head_says_which_of_its_tokens_are_frequent(finished):
    config, output, _ = finished
    answers = read_shards(output / "responses")
    counts = np.bincount(answers.tokens, minlength=259)
    source = str(output / "export" / "shared")
    drafter = DrafterConfig(kind="eagle3", source=source, draft_vocab_size=5)
    head = load_drafter(drafter, pipeline(config, output).target, Build(jnp.dtype(jnp.float32)))
    kept = counts[head.target_ids[...]]
    assert sorted(kept) == sorted(counts)[-5:]
    assert kept.min() > np.median(counts)


def test_a_finished_stage_is_not_run_again(finished):
    config, output, reports = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    run = pipeline(config, output)
    assert {stage: run.run_stage(stage) for stage in STAGES} == reports
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_resume_is_bit_exact(finished, tmp_path, monkeypatch):
    config, output, _ = finished
    for stage in ("prompts", "responses", "vocabulary"):
        shutil.copytree(output / stage, tmp_path / stage)
    update, updates = Trainer.update, []

    def interrupted(self, state, rows):
        updates.append(int(state.step))
        if len(updates) == 30:
            raise KeyboardInterrupt
        return update(self, state, rows)

    monkeypatch.setattr(Trainer, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline(config, tmp_path).run_stage("train")
    pipeline(config, tmp_path).run_stage("train")
    assert updates[30] == 20  # from the checkpoint, not from the start
    runs = [pipeline(config, folder) for folder in (output, tmp_path)]
    states = [restore_head(r._new_head(), r.target, r.run.train, r.output / "train")[1] for r in runs]
    for left, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(left, right)
    losses = [
        [(row["step"], row["loss"]) for row in MetricsFile(r.output / "train" / "metrics.jsonl").rows()]
        for r in runs
    ]
    assert losses[0] == losses[1]
