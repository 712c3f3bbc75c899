"""Every option of a training run, of its file and of its command line, reaches the stage that it is about."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import export_head as export_script
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from options import arguments, assert_complete, fields
from tiny_run import write_target

from jaxspec import AcceptanceStats, EngineConfig, Generation, SamplingParams
from jaxspec.checkpoints import open_checkpoint
from jaxspec.commands import train as train_command
from jaxspec.config import ConfigError, SourceConfig
from jaxspec.models.loading import load_target
from jaxspec.sampling import SamplingMode
from jaxspec.training import pipeline, trainer
from jaxspec.training import train as train_module
from jaxspec.training.config import (
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
from jaxspec.training.evaluate import measure
from jaxspec.training.export import embedding_rows, export_head
from jaxspec.training.head import head_config, is_trained, new_head
from jaxspec.training.optimizer import learning_rate_schedule, make_optimizer
from jaxspec.training.packing import Conversations
from jaxspec.training.prompts import HELD_OUT, PROMPTS, make_prompts
from jaxspec.training.responses import make_responses
from jaxspec.training.sizes import resolve_sizes
from jaxspec.training.stage_folder import STAGES, StageFolder
from jaxspec.training.token_rows import TokenRows, read_shards

IDS = np.arange(5, 245, 3, dtype=np.int32)


class Echo:
    """An engine whose answers are a text and its end; it records what it is asked."""

    max_model_len = 999

    def __init__(self, tokens):
        self.tokens, self.asked = tokens, []

    def make_request(self, prompt, params):
        self.asked.append((prompt, params))
        return prompt, params

    def run(self, requests):
        for i, (prompt, params) in enumerate(requests):
            tokens = [*self.tokens, *prompt[-1:], 2][-params.max_new_tokens :]
            yield i, Generation("", tokens, "stop", prompt, AcceptanceStats(), params.seed)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a head for it, and files of prompts."""
    root = tmp_path_factory.mktemp("options")
    target = load_target(open_checkpoint(write_target(root / "target")), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(fc_norm=True), target.config, IDS.size),
        target,
        IDS,
        num_speculative_tokens=3,
        seed=7,
    )
    told = {"form": "shared", "target_name": "tiny", "dtype": "float32", "card": ""}
    export_head(head, target.config, root / "head", embedding=embedding_rows(target), **told)
    for name, count in (("a", 20), ("b", 4)):
        rows = [{"prompt": f"the {name} number {i} of them"} for i in range(count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "apart.jsonl").write_text('{"turns": ["the a number 3 of them"]}\n')
    (root / "long.jsonl").write_text(json.dumps({"prompt": "long " * 12}) + "\n")
    return root


@pytest.fixture(scope="module")
def tokenizer(files):
    return open_checkpoint(files / "target").tokenizer


def opened(files, tmp_path, target=None, **sections):
    """A pipeline whose sections are the defaults but for these."""
    run = TrainingRun(target=target or SourceConfig(str(files / "target")), **sections)
    return pipeline.Pipeline(run, tmp_path / "out", data=files)


# Prompts


@pytest.fixture
def prompts(files, tokenizer, tmp_path):
    """Makes prompts; returns the results, the prompts and the engine."""
    folders = iter(range(100))

    def make(**section):
        config = PromptsConfig(**{"files": ("a.jsonl",), **section})
        folder = StageFolder(tmp_path / f"{next(folders)}", "prompts", {})
        engine = Echo(tokenizer.encode("one two three "))
        make_prompts(config, tokenizer, folder, data=files, engine=engine, longest=100, ends=(2,))
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
    _, trained, held_out, _ = prompts(held_out_share=0.2)
    assert len(held_out) == 5  # a quarter of them
    assert not {*map(tuple, trained)} & {*map(tuple, held_out)}
    with_long = {"files": ("a.jsonl", "long.jsonl")}
    assert prompts(**with_long)[0]["too_long"] == 0
    assert prompts(**with_long, max_tokens=50)[0]["too_long"] == 1
    other = prompts(seed=5)[1]
    assert (other != kept, sorted(other) == sorted(kept)) == (True, True)
    found, _, _, engine = prompts(synthetic=3, synthetic_temperature=0.5, synthetic_max_tokens=90, seed=5)
    assert found["synthetic"] == 3
    params = [SamplingParams(temperature=0.5, max_new_tokens=90, seed=(5 << 32) + i) for i in range(3)]
    assert [each for _, each in engine.asked] == params


# Responses


def test_every_key_of_responses_decides_how_prompts_are_answered(tmp_path):
    assert_complete(
        "[responses]",
        fields(ResponsesConfig),
        {"temperatures", "extra_temperatures", "max_new_tokens", "seed"},
    )
    config = ResponsesConfig(temperatures=(0.5, 0.7), extra_temperatures=(0.9,), max_new_tokens=9, seed=3)
    rows = TokenRows.of((i, [10 + i], True) for i in range(4))
    given = TokenRows.of([(1, [77, 2], True)])
    folder, engine = StageFolder(tmp_path, "responses", {}), Echo([6, 7])
    make_responses(config, rows, given, folder, lambda: engine)
    # The second brought its answer.
    wanted = {0: (10, 0.5), 2: (12, 0.5), 3: (13, 0.7), 4: (10, 0.9), 6: (12, 0.9), 7: (13, 0.9)}
    assert engine.asked == [
        ([prompt], SamplingParams(temperature=temperature, max_new_tokens=9, seed=(3 << 32) + i))
        for i, (prompt, temperature) in wanted.items()
    ]
    answers = {index: ids.tolist() for index, ids, _ in read_shards(folder.path).rows()}
    assert answers == {1: [77, 2], **{i: [6, 7, prompt, 2] for i, (prompt, _) in wanted.items()}}


# Vocabulary and head

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


# Training


def test_every_size_of_training_that_is_derived_follows_what_is_asked(files):
    target = load_target(open_checkpoint(files / "target"), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(), target.config, 80), target, IDS, num_speculative_tokens=3, seed=0
    )
    lengths = np.full(4000, 50)

    def sizes(**changes):
        config = TrainConfig(**changes)
        return resolve_sizes(config, head, target, lengths, memory=10**11, devices=1)

    default = sizes()
    assert sizes(steps=200).steps == 200
    assert sizes(epochs=80.0).steps == 2 * sizes(epochs=40.0).steps
    assert sizes(batch_size=3).batch_size == 3
    assert sizes(batch_tokens=4096).batch_size * 4 == default.batch_size
    assert sizes(row_length=128).row_length == 128 != default.row_length
    assert sizes(validation_rows=default.batch_size).validation_rows == default.batch_size
    assert sizes(validation_rows=0).validation_rows == 0 != default.validation_rows
    assert sizes(num_unroll_steps=3).num_unroll_steps == 3
    for name in ("warmup_steps", "validate_every", "checkpoint_every"):
        assert getattr(sizes(**{name: 7}), name) == 7 != getattr(default, name)
    kept = {"optimizer": "muon", "learning_rate": 1e-2, "objective": "total_variation", "seed": 4}
    kept |= {"clip_norm": 2.0, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.6, "step_decay": 0.3}
    kept |= {"log_every": 3, "epochs": 5.0, "batch_tokens": 999}
    assert kept.items() <= dataclasses.asdict(sizes(**kept)).items()


SIZED = TrainConfig(steps=40, batch_size=2, row_length=16, warmup_steps=4, validation_rows=2)
OPTIMISED = {"optimizer": "muon", "clip_norm": 0.01, "weight_decay": 0.5, "beta1": 0.1, "beta2": 0.1}


def test_every_key_of_the_optimiser_changes_an_update(files):
    target = load_target(open_checkpoint(files / "target"), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(), target.config, 80), target, IDS, num_speculative_tokens=3, seed=0
    )
    some = lambda path, value: is_trained(path, value) and path[0] in ("fc", "norm")  # noqa: E731
    _, declared, _ = nnx.split(head, some, ...)

    def second_update(config):
        optimizer, params = make_optimizer(config, declared), jax.tree.leaves(declared)
        state = optimizer.init(params)
        for scale in (1.0, -0.3):
            grads = [scale * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in params]
            updates, state = optimizer.update(grads, state, params)
        return np.concatenate([np.ravel(x) for x in updates])

    default = second_update(replace(SIZED, clip_norm=1e9))
    assert np.isfinite(default).all()
    for name, value in OPTIMISED.items():
        changed = second_update(replace(SIZED, **{"clip_norm": 1e9, name: value}))
        assert np.abs(changed - default).max() > 1e-3 * np.abs(default).max(), name
    rates = {rate: learning_rate_schedule(replace(SIZED, learning_rate=rate)) for rate in (1e-3, 2e-3)}
    assert float(rates[2e-3](4)) == pytest.approx(2e-3)
    assert float(rates[1e-3](2)) == pytest.approx(0.5e-3)
    assert float(rates[1e-3](40)) == pytest.approx(1e-5)
    assert float(learning_rate_schedule(replace(SIZED, learning_rate=1e-3, warmup_steps=8))(2)) < 0.3e-3
    assert float(learning_rate_schedule(replace(SIZED, learning_rate=1e-3, steps=80))(40)) > 0.3e-3


LOSS = {"num_unroll_steps": 3, "step_decay": 0.3, "objective": "total_variation"}


def test_every_key_of_the_loss_reaches_it(files, monkeypatch):
    target = load_target(open_checkpoint(files / "target"), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(), target.config, 80), target, IDS, num_speculative_tokens=3, seed=0
    )

    def loss(head, target, rows, *, num_steps, step_decay, objective, cross_entropy_weight, axis):
        raise InterruptedError(
            {"num_unroll_steps": num_steps, "step_decay": step_decay, "objective": objective}
        )

    monkeypatch.setattr(trainer, "unrolled_loss", loss)
    trains = trainer.Trainer(head, target, replace(SIZED, **LOSS))
    for program in (trains.update, trains.validate):
        with pytest.raises(InterruptedError) as told:
            program(trains.initial_state(), None)
        assert told.value.args == (LOSS,)


@pytest.fixture
def looped(tmp_path, monkeypatch):
    """Runs the stage up to its loop, over thirty conversations of a token of their own; returns the tokens of
    the rows to train on in order, those of the validation rows, and their shape."""
    monkeypatch.setattr(
        train_module, "Trainer", lambda *told: SimpleNamespace(initial_state=lambda: SimpleNamespace(step=0))
    )
    monkeypatch.setattr(
        train_module,
        "Checkpoints",
        lambda path: SimpleNamespace(restore=lambda state: None, close=lambda: None),
    )

    def loop(trainer, state, batches, validation, *more):
        raise InterruptedError(batches, validation)

    monkeypatch.setattr(train_module, "_loop", loop)
    conversations = Conversations(np.repeat(np.arange(100, 130), 8), np.arange(0, 241, 8), np.full(30, 3))

    def run(**changes):
        folder = StageFolder(tmp_path / "out", "train", {})
        with pytest.raises(InterruptedError) as told:
            train_module.train(None, None, conversations, replace(SIZED, **changes), folder)
        batches, validation = told.value.args
        trained = [next(batches)["tokens"] for _ in range(12)]
        return np.stack(trained), [batch["tokens"] for batch in validation]

    return run


def test_rows_are_as_many_and_as_long_as_asked_and_those_of_validation_are_not_trained_on(looped):
    trained, validation = looped()
    assert trained.shape[1:] == (2, 16)
    assert np.concatenate(validation).shape == (2, 16)
    assert not {*np.unique(trained)} - {0} & {*np.unique(validation)} - {0}
    assert {*np.unique(trained)} | {*np.unique(validation)} >= {*range(100, 130)}
    assert looped(batch_size=3)[0].shape[1:] == (3, 16)
    assert looped(row_length=24)[0].shape[1:] == (2, 24)
    assert np.concatenate(looped(validation_rows=4)[1]).shape == (4, 16)
    assert looped(validation_rows=0)[1] == []
    assert not np.array_equal(looped(seed=3)[0], trained)
    np.testing.assert_array_equal(looped()[0], trained)


class Loader:
    """Batches of nothing."""

    taken = 0

    def __next__(self):
        self.taken += 1

    def get_state(self):
        return self.taken


EVERY = {"log_every": 5, "validate_every": 8, "checkpoint_every": 16}


def test_what_happens_now_and_then_happens_as_often_as_asked(monkeypatch, tmp_path):
    did = []
    monkeypatch.setattr(train_module, "can_plot", lambda: False)
    monkeypatch.setattr(train_module, "_means", lambda sums: {"loss": [1.0], "accuracy": [0.5]})
    trains = SimpleNamespace(
        config=replace(SIZED, steps=18, **EVERY),
        put=lambda rows: rows,
        update=lambda state, rows: (state, None),
        validate=lambda state, rows: None,
        schedule=lambda step: 0.0,
    )
    saves = SimpleNamespace(save=lambda state, data: did.append(data))
    metrics = train_module.MetricsFile(tmp_path / "metrics.jsonl")
    loader = Loader()
    train_module._loop(trains, SimpleNamespace(step=0), loader, [None], saves, metrics, tmp_path / "plot.png")
    steps = {
        kind: [row["step"] for row in metrics.rows() if row["kind"] == kind]
        for kind in ("train", "validation")
    }
    assert steps == {"train": [5, 10, 15, 16, 18], "validation": [0, 8, 16, 18]}
    assert did == [16, 18]


def test_no_key_of_training_is_without_a_test():
    derived = {"steps", "epochs", "batch_size", "batch_tokens", "row_length"}
    rows = {"validation_rows", "seed", "learning_rate", "warmup_steps"}
    assert_complete("[train]", fields(TrainConfig), derived, rows, OPTIMISED, LOSS, EVERY)


class Given(BaseException):
    """What a stage was about to use."""


def give(*told, **options):
    raise Given(told, options)


def given(call, *arguments):
    with pytest.raises(Given) as told:
        call(*arguments)
    return told.value.args


@pytest.fixture
def vocabulary(monkeypatch):
    """Stages that are finished, with a draft vocabulary."""
    monkeypatch.setattr(pipeline.Pipeline, "_most_frequent", IDS)
    monkeypatch.setattr(pipeline.Pipeline, "_finished", lambda self, stage: self._folder(stage))


def test_training_starts_from_the_head_that_is_adapted_or_from_its_seed(
    files, tmp_path, monkeypatch, vocabulary
):
    conversations = SimpleNamespace(start=np.arange(0, 4001, 50))
    monkeypatch.setattr(pipeline.Pipeline, "_conversations", lambda self: conversations)
    monkeypatch.setattr(pipeline, "train", give)

    def trained(name, **sections):
        run = opened(files, tmp_path / name, vocabulary=VocabularyConfig(IDS.size), **sections)
        (head, target, rows, config, _, devices), _ = given(run.run_stage, "train")
        assert devices == jax.devices()
        assert (target, rows) == (run.target, conversations)
        return jax.tree.leaves(nnx.state(head, is_trained)), config

    adapted, _ = trained("adapted", head=HeadConfig(initial="head"))
    run = opened(files, tmp_path, head=HeadConfig(initial="head"))
    for ours, initial in zip(adapted, jax.tree.leaves(nnx.state(run._initial, is_trained)), strict=True):
        np.testing.assert_array_equal(ours, initial)
    default, config = trained("default")
    other, _ = trained("other", train=TrainConfig(seed=1))
    assert any(not np.array_equal(*pair) for pair in zip(default, other, strict=True))
    assert config.row_length  # resolved
    _, config = trained("short", train=TrainConfig(steps=9, warmup_steps=2, optimizer="muon"))
    assert (config.steps, config.optimizer) == (9, "muon")


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


# Evaluation and export

EVALUATE = {"temperatures": (0.0, 0.5), "seeds": (8, 9), "max_new_tokens": 7}


def test_every_key_of_the_evaluation_reaches_its_answers(files, tmp_path, monkeypatch, vocabulary):
    assert_complete("[evaluate]", fields(EvaluateConfig), EVALUATE, {"files", "num_speculative_tokens"})
    config = EvaluateConfig(files=("a.jsonl",), num_speculative_tokens=2, **EVALUATE)
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
        return {}

    monkeypatch.setattr(pipeline, "measure", measured)
    run = opened(files, tmp_path, evaluate=config, vocabulary=VocabularyConfig(IDS.size))
    run.run_stage("evaluate")
    ((positions, head), prompts, asked), ((_, baseline), before, _) = calls
    longest = max(len(ids) for ids in prompts["a.jsonl"])
    assert (positions, head, asked) == (longest + 7, ("trained", "state"), config)
    assert {name: len(ids) for name, ids in prompts.items()} == {"held-out": 1, "a.jsonl": 20}
    assert before == prompts
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
    told = ExportConfig("my/target", "MIT", ("rows of mine, CC0",), "jaxspec train --it")
    (head, _, folder), options = given(opened(files, tmp_path, export=told).run_stage, "export")
    assert (head, folder.parent.name, options["target_name"]) == ("state", "export", "my/target")
    for text in ("my/target", "| licence | MIT |", "- rows of mine, CC0", "jaxspec train --it"):
        assert text in options["card"]
    _, options = given(opened(files, tmp_path / "plain").run_stage, "export")
    assert options["target_name"] == str(files / "target")
    assert "licence | not stated" in options["card"]


# The engine that generates and measures


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
        "cpu_activations": "float32",
        "cache_dtype": "bfloat16",
        "synthetic_acceptance_length": 2.0,
    }
    # A training run refuses to split weights, and packs none.
    refused = {"max_model_len", "tensor_parallel", "packed"}
    assert_complete("[engine]", fields(EngineConfig), settings, refused)
    run = opened(files, tmp_path, engine=EngineConfig(**settings))
    (target, drafter), options = given(run._engine, 50)
    assert options["config"] == EngineConfig(**settings, max_model_len=50)
    assert target.output_kernel.dtype == jnp.bfloat16
    assert options["eos_token_ids"] == run.checkpoint.eos_token_ids == (2,)
    assert (drafter.num_speculative_tokens, options["sampling_modes"]) == (0, (SamplingMode.TEMPERATURE,))
    assert given(run._engine, 50, "a head")[0] == (target, "a head")


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


# The command line


@pytest.fixture
def commanded(files, monkeypatch, tmp_path):
    """Runs the command up to its pipeline; returns what that is given and the stages that are run."""

    class Recorder:
        def __init__(self, run, output, *, data, device):
            self.run, self.output, self.data, self.device, self.stages = run, output, data, device, []
            made.append(self)

        def begin_anew(self):
            return []

        def run_stage(self, stage):
            self.stages.append(stage)
            return {"acceptance_length": {}}

    made = []
    monkeypatch.setattr(pipeline, "Pipeline", Recorder)

    def run(*words):
        assert train_command.main([*map(str, words), "--output", str(tmp_path / "out")]) == 0
        return made.pop()

    run.new = ["--target", files / "target", "--prompts", files / "a.jsonl"]
    return run


# Options with a value, and where it is to be found in the run.
NUMBERS = {
    "held_out_share": (0.2, "prompts.held_out_share"),
    "max_prompt_tokens": (99, "prompts.max_tokens"),
    "max_new_tokens": (33, "responses.max_new_tokens"),
    "vocabulary": (77, "vocabulary.size"),
    "steps": (66, "train.steps"),
    "epochs": (2.5, "train.epochs"),
    "row_length": (55, "train.row_length"),
    "batch_tokens": (4444, "train.batch_tokens"),
    "learning_rate": (0.125, "train.learning_rate"),
    "average_initial": (0.25, "average.initial"),
    "num_speculative_tokens": (3, "evaluate.num_speculative_tokens"),
    "slots": (22, "engine.batch_size"),
    "target_name": ("my/target", "export.target_name"),
    "license": ("MIT", "export.license"),
}


def test_every_option_of_the_command_reaches_the_run(files, commanded, tmp_path):
    tried = {"config", "output", "target", "adapt", "prompts", "held_out", "data_license", "data"}
    more = {"resume", "stage", "device", "imports"}
    assert_complete("jaxspec train", arguments(train_command.main), NUMBERS, tried, more)
    adapting = [*commanded.new, "--adapt", files / "head"]
    default = commanded(*adapting)
    for name, (value, place) in NUMBERS.items():
        section, _, key = place.partition(".")
        run = commanded(*adapting, f"--{name.replace('_', '-')}", value).run
        assert getattr(getattr(run, section), key) == value, name
        assert getattr(getattr(default.run, section), key) != value, name
    assert commanded(*adapting, "--max-new-tokens", 33).run.evaluate.max_new_tokens == 33
    assert default.device is None
    assert commanded(*adapting, "--device", "cpu:0").device == "cpu:0"
    assert default.run.target == SourceConfig(str(files / "target"))
    assert default.run.prompts.files == (str(files / "a.jsonl"),)
    assert default.run.head.initial == str(files / "head")
    assert commanded(*commanded.new).run.head.initial == ""
    assert (default.output, default.stages) == (tmp_path / "out", list(STAGES))
    found = commanded(*adapting, "--held-out", files / "apart.jsonl", "--data-license", "a, MIT", "b, CC0")
    assert found.run.prompts.held_out == (str(files / "apart.jsonl"),)
    assert found.run.export.data == ("a, MIT", "b, CC0")
    assert "--data-license 'a, MIT' 'b, CC0'" in found.run.export.command
    stages = ["--stage", "train", "--stage", "prompts"]
    assert commanded(*adapting, *stages).stages == ["prompts", "train"]


def test_options_change_the_run_of_a_file(files, commanded, tmp_path):
    path = tmp_path / "runs" / "run.toml"
    path.parent.mkdir()
    path.write_text('[target]\nsource = "there"\n[train]\nsteps = 50\nwarmup_steps = 9\n', "utf-8")
    found = commanded(path)
    assert (found.run.target.source, found.run.train.steps, found.data) == ("there", 50, path.parent)
    assert commanded(path, "--data", files).data == files
    assert commanded(path, "--target", files / "target").run.target.source == str(files / "target")
    assert commanded(path, "--adapt", files / "head").run.head.initial == str(files / "head")
    assert commanded(path, "--prompts", files / "b.jsonl").run.prompts.files == (str(files / "b.jsonl"),)
    mine = tmp_path / "mine.py"
    mine.write_text("raise ImportError('it was run')\n")
    with pytest.raises(SystemExit):
        commanded(path, "--import", mine)
    # A run that was begun goes on only if that is asked for.
    StageFolder(tmp_path / "out", "prompts", {}).finish()
    with pytest.raises(AssertionError):
        commanded(path)
    assert commanded(path, "--resume").stages
    assert "--resume" not in commanded(path, "--resume").run.export.command


def test_an_average_needs_a_head():
    with pytest.raises(ConfigError, match=r"average\.initial needs head\.initial"):
        TrainingRun(target=SourceConfig("t"), average=AverageConfig(0.5))


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
