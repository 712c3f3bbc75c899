"""The stage "train": the loop around the trainer, with metrics, validation, checkpoints and resume."""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from jaxspec.config import ConfigError
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.jax_settings import Device
from jaxspec.lab.training.checkpoints import Checkpoints
from jaxspec.lab.training.config import TrainConfig
from jaxspec.lab.training.loss import StepSums
from jaxspec.lab.training.metrics import MetricsFile, can_plot, expected_length, plot_progress
from jaxspec.lab.training.packing import Conversations, PackedSource, pack, training_batches
from jaxspec.lab.training.stage_folder import StageFolder
from jaxspec.lab.training.trainer import Trainer, TrainState
from jaxspec.models.decoder import Decoder

METRICS, PLOT, CHECKPOINTS = "metrics.jsonl", "progress.png", "checkpoints"


def train(
    head: Eagle3,
    target: Decoder,
    conversations: Conversations,
    config: TrainConfig,
    folder: StageFolder,
    device: Device | None = None,
) -> None:
    """Trains up to `config.steps` updates, starting from the latest checkpoint if there is one.

    Args:
      head: from `new_head`, perhaps with parameters from `start_from`.
      target: the target; the computation uses the dtype of its weights.
      conversations: prompts with answers.
      config: resolved sizes, without zeros.
      folder: the stage's folder.
      device: as for `Trainer`.

    Raises:
      ConfigError: there is too little data, a batch does not split evenly over the devices, or the loss is
        not finite.
    """
    trainer = Trainer(head, target, config, device)
    # Rows cut off the end of a conversation: if the prompt fills the row, nothing of the answer is left.
    usable = np.flatnonzero(conversations.prompt_length + 2 <= config.row_length)
    packed = pack(np.diff(conversations.start)[usable], config.row_length, config.seed)
    rows = [usable[row].tolist() for row in packed]
    kept = len(rows) - config.validation_rows
    if kept < config.batch_size:
        raise ConfigError(
            f"the answers fill {len(rows)} rows of {config.row_length} tokens; train.batch_size "
            f"{config.batch_size} and train.validation_rows {config.validation_rows} need more"
        )
    batches = training_batches(
        PackedSource(conversations, rows[:kept], config.row_length),
        batch_size=config.batch_size,
        seed=config.seed,
    )
    held_out = PackedSource(conversations, rows[kept:], config.row_length)
    validation = held_out.padded_batches(config.batch_size)
    checkpoints = Checkpoints(folder.path / CHECKPOINTS)
    metrics = MetricsFile(folder.path / METRICS)
    state = trainer.initial_state()
    resumed = checkpoints.restore(state)
    if resumed is not None:
        state, data = resumed
        batches.set_state(data)
    metrics.cut(int(state.step))
    try:
        state = _loop(trainer, state, batches, validation, checkpoints, metrics, folder.path / PLOT)
    finally:
        checkpoints.close()
    last = [row for row in metrics.rows() if row["kind"] == "train"]
    folder.finish(
        updates=int(state.step),
        tokens=last[-1]["tokens"],
        rows=kept,
        left_out=len(conversations) - usable.size,
        tokens_per_second=float(np.median([row["tokens_per_second"] for row in last])),
        operations_per_token=trainer.operations_per_token,
        accuracy=[row for row in metrics.rows() if row["kind"] == "validation"][-1:],
        device=trainer.devices[0].device_kind,
        devices=len(trainer.devices),
    )


def restore_head(
    head: Eagle3,
    target: Decoder,
    config: TrainConfig,
    folder: Path,
    device: Device | None = None,
) -> tuple[Trainer, TrainState]:
    """The trainer and the latest state of a run.

    Raises:
      ConfigError: there is no checkpoint yet.
    """
    trainer = Trainer(head, target, config, device)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    restored = checkpoints.restore(trainer.initial_state())
    checkpoints.close()
    if restored is None:
        raise ConfigError(f"{folder}: has no checkpoint yet; run the stage 'train' first")
    return trainer, restored[0]


def _loop(
    trainer: Trainer,
    state: TrainState,
    batches: Any,
    validation: list[dict],
    checkpoints: Checkpoints,
    metrics: MetricsFile,
    plot: Path,
) -> TrainState:
    if not can_plot():
        print("matplotlib is not installed, so progress is not plotted", file=sys.stderr)
    config = trainer.config
    batch_tokens = config.batch_size * config.row_length
    done = int(state.step)
    pending: list[StepSums] = []

    def validate() -> None:
        if validation:
            parts = [trainer.validate(state, trainer.put(batch)) for batch in validation]
            metrics.append(kind="validation", step=done, tokens=done * batch_tokens, **_means(parts))
        if can_plot():
            plot_progress(metrics.rows(), plot)

    if not any(row["kind"] == "validation" for row in metrics.rows()):
        validate()
    begin = time.monotonic()
    with tqdm(total=config.steps, initial=done, desc="train", unit="update", mininterval=2) as bar:
        while done < config.steps:
            rows = trainer.put(next(batches))
            state, sums = trainer.update(state, rows)
            pending.append(sums)
            done += 1
            bar.update()
            is_saved = done % config.checkpoint_every == 0 or done == config.steps
            # Also before every checkpoint, so that a run that goes on from there writes the same rows.
            if done % config.log_every == 0 or is_saved:
                means = _means(pending)
                seconds = time.monotonic() - begin
                metrics.append(
                    kind="train",
                    step=done,
                    tokens=done * batch_tokens,
                    learning_rate=float(trainer.schedule(done - 1)),
                    tokens_per_second=len(pending) * batch_tokens / seconds,
                    **means,
                )
                bar.set_postfix(
                    loss=means["loss"][0],
                    tokens_a_step=_so_far(metrics) or expected_length(means["accuracy"]),
                    refresh=False,
                )
                pending, begin = [], time.monotonic()
                if not np.isfinite(means["loss"]).all():
                    raise ConfigError(
                        f"the loss is not finite after {done} updates; train.learning_rate "
                        f"{config.learning_rate:g} may be too high"
                    )
            if done % config.validate_every == 0 or done == config.steps:
                validate()
                begin = time.monotonic()
            if is_saved:
                checkpoints.save(state, batches.get_state())
                begin = time.monotonic()
    return state


def _so_far(metrics: MetricsFile) -> float | None:
    """The expected acceptance length at temperature 0 by the last validation, or None."""
    rows = [row for row in metrics.rows() if row["kind"] == "validation"]
    return expected_length(rows[-1]["accuracy"]) if rows else None


def _means(sums: list[StepSums]) -> dict[str, list[float]]:
    """Loss, overlap and accuracy of every draft step, as means over several batches."""
    total = jax.tree.map(lambda *parts: np.sum(jax.device_get(parts), axis=0), *sums)
    return {name: np.asarray(mean).tolist() for name, mean in total.means().items()}
