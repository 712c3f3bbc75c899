"""Every option of prompts, responses, vocabulary, head and engine reaches the stage that it is about."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from options import assert_complete, fields
from staged_run import IDS, Echo, give, given, opened

from jaxspec import EngineConfig, SamplingParams
from jaxspec.config import ConfigError, SourceConfig
from jaxspec.lab.training import pipeline
from jaxspec.lab.training.config import (
    AverageConfig,
    EvaluateConfig,
    ExportConfig,
    HeadConfig,
    PromptsConfig,
    ResponsesConfig,
    TrainConfig,
    TrainingRun,
    VocabularyConfig,
)
from jaxspec.lab.training.prompts import HELD_OUT, PROMPTS, make_prompts
from jaxspec.lab.training.responses import make_responses
from jaxspec.lab.training.stage_folder import STAGES, StageFolder
from jaxspec.lab.training.token_rows import TokenRows, read_shards
from jaxspec.sampling import SamplingMode


@pytest.fixture
def prompts(files, tokenizer, tmp_path):
    """Makes prompts; returns the results, the prompts and the engine."""
    folders = iter(range(100))

    def make(longest=100, cut=(), **section):
        config = PromptsConfig(**{"files": ("a.jsonl",), **section})
        folder = StageFolder(tmp_path / f"{next(folders)}", "prompts", {})
        engine = Echo(tokenizer.encode("one two three "), cut)
        make_prompts(config, tokenizer, folder, data=files, engine=engine, longest=longest, ends=(2,))
        read = [TokenRows.load(folder.path / name).sequences() for name in (PROMPTS, HELD_OUT)]
        return folder.results, *[[ids.tolist() for ids in each] for each in read], engine

    return make


def test_every_key_of_prompts_decides_which_there_are(prompts):
    tried = {"files", "held_out", "held_out_share", "max_tokens", "seed"}
    synthetic = {"synthetic", "synthetic_temperature", "synthetic_max_tokens"}
    assert_complete("[prompts]", fields(PromptsConfig), tried, synthetic)
    default, kept, apart, engine = prompts()
    assert (default["prompts"], default["held_out"], len(kept), apart, engine.asked) == (20, 0, 20, [], [])
    assert prompts(files=("a.jsonl", "b.jsonl"))[0]["from_files"] == 24
    assert prompts(held_out=("apart.jsonl",))[0]["held_out"] == 1
    assert prompts(held_out=("b.jsonl", "apart.jsonl"))[0]["held_out"] == 1
    _, trained, held_out, _ = prompts(held_out_share=0.2)
    assert len(held_out) == 5  # a quarter of them
    assert not {*map(tuple, trained)} & {*map(tuple, held_out)}
    with_long = {"files": ("a.jsonl", "long.jsonl")}
    assert prompts(**with_long)[0]["too_long"] == 0
    assert prompts(**with_long, max_tokens=50)[0]["too_long"] == 1
    assert prompts(**with_long, longest=50)[0]["too_long"] == 1
    other = prompts(seed=5)[1]
    assert (other != kept, sorted(other) == sorted(kept)) == (True, True)
    found, _, _, engine = prompts(synthetic=3, synthetic_temperature=0.5, synthetic_max_tokens=90, seed=5)
    assert found["synthetic"] == 3
    assert prompts(synthetic=3, cut=(1,))[0]["synthetic"] == 2
    params = [SamplingParams(temperature=0.5, max_new_tokens=90, seed=(5 << 32) + i) for i in range(3)]
    assert [each for _, each in engine.asked] == params


def test_every_key_of_responses_decides_how_prompts_are_answered(tmp_path):
    assert_complete(
        "[responses]",
        fields(ResponsesConfig),
        {"temperatures", "extra_temperatures", "max_new_tokens", "seed"},
    )
    config = ResponsesConfig(temperatures=(0.5, 0.7), extra_temperatures=(0.9, 1.1), max_new_tokens=9, seed=3)
    rows = TokenRows.of((i, [10 + i], True) for i in range(4))
    given = TokenRows.of([(1, [77, 2], True)])
    folder, engine = StageFolder(tmp_path, "responses", {}), Echo([6, 7])
    make_responses(config, rows, given, folder, lambda: engine)
    # The second brought its answer.
    wanted = {0: (10, 0.5), 2: (12, 0.5), 3: (13, 0.7), 4: (10, 0.9), 6: (12, 0.9), 7: (13, 0.9)}
    wanted |= {8: (10, 1.1), 10: (12, 1.1), 11: (13, 1.1)}
    assert engine.asked == [
        ([prompt], SamplingParams(temperature=temperature, max_new_tokens=9, seed=(3 << 32) + i))
        for i, (prompt, temperature) in wanted.items()
    ]
    answers = {index: ids.tolist() for index, ids, _ in read_shards(folder.path).rows()}
    assert answers == {1: [77, 2], **{i: [6, 7, prompt, 2] for i, (prompt, _) in wanted.items()}}


HEAD = {
    "num_layers": (2, lambda c: c.layers.num_hidden_layers == 2),
    "intermediate_size": (20, lambda c: c.layers.intermediate_size == 20),
    "capture": ((1, 2, 4), lambda c: c.capture == (1, 2, 4)),
    "rope_theta": (5e5, lambda c: c.layers.rope.theta == 5e5),
    "norm_before_residual": (True, lambda c: c.norm_before_residual),
    "fc_norm": (True, lambda c: c.fc_norm),
    "norm_output": (True, lambda c: c.norm_output),
}


def test_every_key_of_the_head_and_of_its_vocabulary_shapes_it(files, tmp_path):
    assert_complete("[head]", fields(HeadConfig), HEAD, {"initial"})
    assert_complete("[vocabulary]", fields(VocabularyConfig), {"size"})
    default = opened(files, tmp_path).head_config
    for name, (value, is_there) in HEAD.items():
        config = opened(files, tmp_path, head=HeadConfig(**{name: value})).head_config
        assert is_there(config), name
        assert not is_there(default), name
    assert default.draft_vocab_size == 259
    assert opened(files, tmp_path, vocabulary=VocabularyConfig(100)).head_config.draft_vocab_size == 100
    adapted = opened(files, tmp_path, head=HeadConfig(initial="head"))
    assert (adapted.head_config.draft_vocab_size, adapted.head_config.fc_norm) == (IDS.size, True)


def test_the_engine_is_the_runs_and_ends_answers_where_the_target_does(files, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "Engine", give)
    settings = {
        "batch_size": 3,
        "page_size": 4,
        "num_pages": 90,
        "prefix_caching": False,
        "prefill_chunk": 8,
        "prefill_batch_size": 3,
        "mixed_prefill_tokens": 16,
        "slot_sizes": (2,),
        "steps_per_dispatch": 2,
        "dtype": "bfloat16",
        "exact": True,
        "cpu_activations": "float32",
        "cache_dtype": "bfloat16",
        "synthetic_acceptance_length": 2.0,
    }
    # A training run splits, rounds and packs no weights; activations are rounded only beside packed ones.
    refused = {"max_model_len", "tensor_parallel", "packed", "output_dtype", "gpu_activations"}
    assert_complete("[engine]", fields(EngineConfig), settings, refused)
    run = opened(files, tmp_path, engine=EngineConfig(**settings))
    (target, drafter), options = given(run._engine, 50)
    assert options["config"] == EngineConfig(**settings, max_model_len=50)
    assert target.output_kernel.dtype == jnp.bfloat16
    assert options["eos_token_ids"] == run.checkpoint.eos_token_ids == (2,)
    assert (drafter.num_speculative_tokens, options["sampling_modes"]) == (0, (SamplingMode.TEMPERATURE,))
    assert given(run._engine, 50, "a head")[0] == (target, "a head")


FROM = {
    "target": "prompts",
    "engine": "prompts",
    "prompts": "prompts",
    "responses": "responses",
    "vocabulary": "vocabulary",
    "head": "vocabulary",
    "train": "train",
}
"""By section, the first stage that is begun anew if the section changes; all later ones follow it."""
CHANGED = {
    "engine": EngineConfig(cache_dtype="bfloat16"),
    "prompts": PromptsConfig(seed=1),
    "responses": ResponsesConfig(seed=1),
    "vocabulary": VocabularyConfig(100),
    "head": HeadConfig(fc_norm=True),
    "train": TrainConfig(seed=1),
    "average": AverageConfig(0.5),
    "evaluate": EvaluateConfig(seeds=(1,)),
    "export": ExportConfig(license="MIT"),
}


def test_a_section_that_changes_begins_every_stage_anew_that_depends_on_it(files, tmp_path, monkeypatch):
    sections = {each.name for each in dataclasses.fields(TrainingRun)}
    only = {"average": {"evaluate", "export"}, "evaluate": {"evaluate"}, "export": {"export"}}
    assert_complete("a training file", sections, FROM, only)
    run = opened(files, tmp_path)
    before = {stage: run._settings(stage) for stage in STAGES}
    changes = CHANGED | {"target": SourceConfig(str(files / "target"), file="other")}
    monkeypatch.setattr(TrainingRun, "__post_init__", lambda run: None)  # an average needs a head
    for section, value in changes.items():
        run.run = dataclasses.replace(run.run, **{section: value})
        after = {stage: run._settings(stage) for stage in STAGES}
        begun = {stage for stage in STAGES if before[stage] != after[stage]}
        assert begun == only.get(section, {*STAGES[STAGES.index(FROM.get(section, "export")) :]}), section
        before = after


def test_a_draft_vocabulary_is_filled_up_with_what_the_head_that_is_adapted_knows(
    files, tmp_path, monkeypatch
):
    answers = TokenRows.of([(0, [7] * 9, True)])
    monkeypatch.setattr(pipeline.Pipeline, "_finished", lambda self, stage: self._folder(stage))
    monkeypatch.setattr(pipeline, "read_shards", lambda path: answers)
    monkeypatch.setattr(pipeline, "choose_vocabulary", give)
    run = opened(files, tmp_path, head=HeadConfig(initial="head"))
    (counts, size), known = given(run.run_stage, "vocabulary")
    assert (counts[7], counts.sum(), size) == (9, 9, IDS.size)
    np.testing.assert_array_equal(known["known"], IDS)


def test_stages_get_the_sections_of_the_run(files, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "make_prompts", give)
    monkeypatch.setattr(pipeline.Pipeline, "_engine", lambda self, positions: ("engine", positions))
    config = PromptsConfig(files=("a.jsonl",), synthetic=2, synthetic_max_tokens=30)
    run = opened(files, tmp_path, prompts=config, responses=ResponsesConfig(max_new_tokens=20))
    (found, _, _), options = given(run.run_stage, "prompts")
    assert found == config
    assert (options["data"], options["engine"]) == (files, ("engine", 94))
    assert (options["longest"], options["ends"]) == (108, (2,))

    monkeypatch.setattr(pipeline, "make_responses", give)
    monkeypatch.setattr(
        pipeline.Pipeline,
        "_read",
        lambda self, name: TokenRows.of([(0, [5] * (9 if name == PROMPTS else 1), True)]),
    )
    (found, rows, answers, _, engine), _ = given(run.run_stage, "responses")
    assert (found, rows.length[0], answers.length[0], engine()) == (
        ResponsesConfig(max_new_tokens=20),
        9,
        1,
        ("engine", 29),
    )


def test_the_target_is_the_one_that_is_named_with_its_hash(files, tmp_path):
    assert_complete("[target]", fields(SourceConfig), {"source", "file", "sha256"})
    sections = {each.name for each in dataclasses.fields(TrainingRun)}
    tables = {"target", "engine", "prompts", "responses", "vocabulary", "head", "train", "average"}
    assert_complete("a training file", sections, tables, {"evaluate", "export"})
    for more, message in (({"file": "missing.gguf"}, "missing.gguf"), ({"sha256": "0" * 64}, "sha256 pins")):
        source = SourceConfig(str(files / "target"), **more)
        with pytest.raises(ValueError, match=message):
            opened(files, tmp_path, target=source)


def test_an_average_needs_a_head():
    with pytest.raises(ConfigError, match=r"average\.initial needs head\.initial"):
        TrainingRun(target=SourceConfig("t"), average=AverageConfig(0.5))
