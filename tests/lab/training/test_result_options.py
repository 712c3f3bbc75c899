"""Every option of averaging, evaluation and export reaches what it is about."""

from types import SimpleNamespace

import export_head as export_script
import jax
import numpy as np
from flax import nnx
from options import arguments, assert_complete, fields
from staged_run import IDS, Echo, give, given, opened

from jaxspec import SamplingParams
from jaxspec.lab.training import pipeline
from jaxspec.lab.training.config import (
    AverageConfig,
    EvaluateConfig,
    ExportConfig,
    HeadConfig,
    VocabularyConfig,
)
from jaxspec.lab.training.evaluate import measure
from jaxspec.lab.training.head import is_trained


def test_the_head_that_is_measured_and_exported_is_the_average_that_is_asked_for(
    files, tmp_path, monkeypatch, vocabulary
):
    assert_complete("[average]", fields(AverageConfig), {"initial"})
    last = SimpleNamespace(params=1)
    restored = SimpleNamespace(averaged=give)
    monkeypatch.setattr(pipeline, "restore_head", lambda *told: (restored, last))
    plain = opened(files, tmp_path / "plain", head=HeadConfig(initial="head"))
    assert plain._trained() == (restored, last)
    run = opened(files, tmp_path, head=HeadConfig(initial="head"), average=AverageConfig(0.25))
    (state, initial, weight), _ = given(run._trained)
    assert (state, weight) == (last, 0.25)
    assert jax.tree.leaves(initial)[0].shape == jax.tree.leaves(nnx.state(run._initial, is_trained))[0].shape


EVALUATE = {"temperatures": (0.0, 0.5), "seeds": (8, 9), "max_new_tokens": 7}


def test_every_key_of_the_evaluation_reaches_its_answers(files, tmp_path, monkeypatch, vocabulary):
    assert_complete("[evaluate]", fields(EvaluateConfig), EVALUATE, {"files", "num_speculative_tokens"})
    config = EvaluateConfig(files=("a.jsonl", "b.jsonl"), num_speculative_tokens=2, **EVALUATE)
    asked = [(0.0, 8), (0.5, 8), (0.5, 9)]
    engine = Echo([5])
    measure(engine, {"set": [[1, 2]]}, config)
    expected = [SamplingParams(temperature=t, max_new_tokens=7, seed=seed) for t, seed in asked]
    assert engine.asked == [([1, 2], params) for params in expected]

    calls = []
    held_out = SimpleNamespace(sequences=lambda: [np.array([5, 6])])
    trains = SimpleNamespace(head=lambda state: ("trained", state))
    monkeypatch.setattr(pipeline.Pipeline, "_read", lambda self, name: held_out)
    monkeypatch.setattr(pipeline.Pipeline, "_trained", lambda self: (trains, "state"))
    monkeypatch.setattr(pipeline.Pipeline, "_engine", lambda self, positions, head: (positions, head))

    def measured(engine, prompts, asked, **label):
        calls.append((engine, prompts, asked))
        accepted = 6 // len(calls)  # of the trained head, then of what it is to beat
        found = {"prompts": 1, "acceptance_length": 1 + accepted / 3, "acceptance_length_interval": None}
        return {"a.jsonl temperature 0": found | {"by_prompt": [(accepted, 3)]}}

    monkeypatch.setattr(pipeline, "measure", measured)
    run = opened(files, tmp_path, evaluate=config, vocabulary=VocabularyConfig(IDS.size))
    run.run_stage("evaluate")
    ((positions, head), prompts, asked), ((_, baseline), before, _) = calls
    longest = max(len(ids) for ids in prompts["a.jsonl"])
    assert (positions, head, asked) == (longest + 7, ("trained", "state"), config)
    sizes = {"held-out": 1, "a.jsonl": 20, "b.jsonl": 4}
    assert {name: len(ids) for name, ids in prompts.items()} == sizes
    assert before == prompts
    (compared,) = run._folder("evaluate").results["compared"].values()
    assert (compared["before"], compared["after"], compared["gain"]) == (2, 3, 1)
    assert baseline.num_speculative_tokens == run._new_head().num_speculative_tokens == 2


def test_every_key_of_the_export_is_in_what_is_exported(files, tmp_path, monkeypatch, vocabulary):
    assert_complete("[export]", fields(ExportConfig), {"target_name", "license", "data", "command"})
    stages = {
        "prompts": {"from_files": 1, "synthetic": 0, "repeated": 0, "held_out": 0, "too_long": 0}
        | {"set_aside": 0, "prompts": 1, "answered": 0},
        "responses": {"answers": 1, "tokens": 1},
        "vocabulary": {"coverage": 1.0},
        "train": {"updates": 1, "tokens": 1, "devices": 1, "device": "cpu", "tokens_per_second": 1.0},
    }
    monkeypatch.setattr(
        pipeline.Pipeline,
        "_finished",
        lambda self, stage: SimpleNamespace(results=stages[stage], path=tmp_path),
    )
    monkeypatch.setattr(
        pipeline.Pipeline, "_trained", lambda self: (SimpleNamespace(masters=lambda s: s), "state")
    )
    monkeypatch.setattr(pipeline, "export_head", give)
    told = ExportConfig("my/target", "MIT", ("rows of mine, CC0", "others, MIT"), "jaxspec train --it")
    (head, _, folder), options = given(opened(files, tmp_path, export=told).run_stage, "export")
    assert (head, folder.parent.name, options["target_name"]) == ("state", "export", "my/target")
    data = ("- rows of mine, CC0", "- others, MIT")
    for text in ("my/target", "| licence | MIT |", *data, "jaxspec train --it"):
        assert text in options["card"]
    _, options = given(opened(files, tmp_path / "plain").run_stage, "export")
    assert options["target_name"] == str(files / "target")
    assert "licence | not stated" in options["card"]


def test_every_option_of_the_script_that_exports_heads_arrives(files, monkeypatch, tmp_path):
    options = {"head", "output", "target", "format", "dtype", "target_name", "imports"}
    assert_complete("export_head.py", arguments(export_script.main), options)
    monkeypatch.setattr(export_script, "export_head", give)
    words = [str(files / "head"), str(tmp_path / "new"), "--target", str(files / "target")]
    (head, _, output), found = given(export_script.main, words)
    assert (output, found["form"], found["dtype"]) == (tmp_path / "new", "speculators", "bfloat16")
    assert found["target_name"] == str(files / "target")
    assert head.config.fc_norm
    words += ["--format", "shared", "--dtype", "float32", "--target-name", "my/target"]
    _, found = given(export_script.main, words)
    assert (found["form"], found["dtype"], found["target_name"]) == ("shared", "float32", "my/target")
