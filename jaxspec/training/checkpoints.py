"""Checkpoints of a training run: state, and the position of the data, saved together."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.training.trainer import TrainState


class Checkpoints:
    """The last checkpoints of one run, through orbax; a half-written one is never seen."""

    def __init__(self, folder: Path):
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        )

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Saves the state and the loader's position."""
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
        """The newest state and data position, or None where none was saved.

        Args:
          state: of the same shapes, dtypes and sharding.
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
