"""Every option of the training itself reaches what it is about."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from options import assert_complete, fields
from safetensors.numpy import load_file
from staged_run import IDS, give, given, opened

from jaxspec.files import open_checkpoint
from jaxspec.lab.training import pipeline, trainer
from jaxspec.lab.training import train as train_module
from jaxspec.lab.training.config import HeadConfig, TrainConfig, VocabularyConfig
from jaxspec.lab.training.head import head_config, is_trained, new_head
from jaxspec.lab.training.loss import StepSums
from jaxspec.lab.training.optimizer import learning_rate_schedule, make_optimizer
from jaxspec.lab.training.packing import Conversations
from jaxspec.lab.training.sizes import resolve_sizes
from jaxspec.lab.training.stage_folder import StageFolder
from jaxspec.models.target import load_target


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

    def second_update(config, largest=np.inf):
        """Of gradients whose norm is at most `largest`."""
        optimizer, params = make_optimizer(config, declared), jax.tree.leaves(declared)
        state = optimizer.init(params)
        for scale in (1.0, -0.3):
            grads = [scale * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in params]
            factor = min(1, largest / np.sqrt(sum(float((x * x).sum()) for x in grads)))
            updates, state = optimizer.update([factor * x for x in grads], state, params)
        return np.concatenate([np.ravel(x) for x in updates])

    default = second_update(replace(SIZED, clip_norm=1e9))
    assert np.isfinite(default).all()
    for name, value in OPTIMISED.items():
        changed = second_update(replace(SIZED, **{"clip_norm": 1e9, name: value}))
        assert np.abs(changed - default).max() > 1e-3 * np.abs(default).max(), name
    clipped = second_update(replace(SIZED, clip_norm=0.5))
    np.testing.assert_allclose(clipped, second_update(replace(SIZED, clip_norm=1e9), 0.5), rtol=1e-5)
    rates = {rate: learning_rate_schedule(replace(SIZED, learning_rate=rate)) for rate in (1e-3, 2e-3)}
    assert float(rates[2e-3](4)) == pytest.approx(2e-3)
    assert float(rates[1e-3](2)) == pytest.approx(0.5e-3)
    assert float(rates[1e-3](40)) == pytest.approx(1e-5)
    assert float(learning_rate_schedule(replace(SIZED, learning_rate=1e-3, warmup_steps=8))(2)) < 0.3e-3
    assert float(learning_rate_schedule(replace(SIZED, learning_rate=1e-3, steps=80))(40)) > 0.3e-3


def test_a_new_head_has_the_output_rows_and_the_norm_of_its_target(files):
    target = load_target(open_checkpoint(files / "target"), dtype=jnp.float32)
    target.norm.scale.set_value(jnp.arange(1.0, 33.0))
    shape = head_config(HeadConfig(), target.config, IDS.size)
    head = new_head(shape, target, IDS, num_speculative_tokens=3, seed=0)
    np.testing.assert_array_equal(head.norm.scale[...], target.norm.scale[...])
    np.testing.assert_array_equal(head.head.kernel[...], target.output_kernel[:, IDS])
    np.testing.assert_array_equal(head.draft_ids[...][IDS], np.arange(IDS.size))
    assert (head.draft_ids[...] >= 0).sum() == IDS.size


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


def test_the_cross_entropy_gives_way_to_the_total_variation_in_the_first_half(files, monkeypatch):
    target = load_target(open_checkpoint(files / "target"), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(), target.config, 80), target, IDS, num_speculative_tokens=3, seed=0
    )

    def loss(*models, cross_entropy_weight, **options):
        weight = jnp.reshape(jnp.float32(cross_entropy_weight), 1)
        return jnp.float32(0), StepSums(weight, weight, weight, weight)

    monkeypatch.setattr(trainer, "unrolled_loss", loss)
    trains = trainer.Trainer(head, target, replace(SIZED, steps=40))

    def weight_at(step):
        _, sums = trains.update(replace(trains.initial_state(), step=jnp.int32(step)), None)
        return float(sums.loss[0])

    assert [weight_at(step) for step in (0, 5, 10, 20, 39)] == [1.0, 0.75, 0.5, 0.0, 0.0]


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
    thirty = Conversations(np.repeat(np.arange(100, 130), 8), np.arange(0, 241, 8), np.full(30, 3))

    def run(conversations=thirty, **changes):
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


def test_conversations_whose_prompt_fills_a_row_are_left_out(looped):
    lengths = np.tile([3, 15], 15)  # of 20 tokens, of which a row has 16
    conversations = Conversations(np.repeat(np.arange(100, 130), 20), np.arange(0, 601, 20), lengths)
    trained, validation = looped(conversations)
    assert not ({*np.unique(trained)} | {*np.unique(validation)}) & {*range(101, 130, 2)}


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
    saved = load_file(files / "head" / "model.safetensors")["fc.weight"]
    assert any(np.array_equal(ours, saved.T) for ours in adapted)  # with all of its bits
    default, config = trained("default")
    other, _ = trained("other", train=TrainConfig(seed=1))
    assert any(not np.array_equal(*pair) for pair in zip(default, other, strict=True))
    assert config.row_length  # resolved
    _, config = trained("short", train=TrainConfig(steps=9, warmup_steps=2, optimizer="muon"))
    assert (config.steps, config.optimizer) == (9, "muon")
