"""Checkpoints of a training run: the state and the loader's position, saved together."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.lab.training.trainer import TrainState


class Checkpoints:
    """The two latest checkpoints of a run, written atomically by orbax."""

    def __init__(self, folder: Path):
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Saves the state and the loader's position, unless this step is already saved."""
        step = int(state.step)
        if self._manager.latest_step() == step:
            return
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            data=ocp.args.JsonSave(data),
        )
        self._manager.save(step, args=args)

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The latest state and loader position, or None if nothing was saved.

        Args:
          state: a state with the shapes, dtypes and sharding to restore.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(state.params),
                opt_state=ocp.args.StandardRestore(state.opt_state),
                data=ocp.args.JsonRestore(),
            ),
        )
        number = jax.device_put(jax.numpy.int32(step), state.step.sharding)
        return TrainState(number, restored["params"], restored["opt_state"]), restored["data"]

    def close(self) -> None:
        self._manager.close()
