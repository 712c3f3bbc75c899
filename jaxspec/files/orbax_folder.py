"""Checkpoints in orbax's format, with the tensors and names of the original checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.jax_settings import own_settings


@dataclass(frozen=True)
class OrbaxTensor:
    """One array of an orbax checkpoint."""

    checkpointer: ocp.Checkpointer
    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        as_numpy = ocp.args.PyTreeRestore(
            item={self.key: 0},
            restore_args={self.key: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        return self.checkpointer.restore(self.path, args=as_numpy)[self.key]


def _checkpointer() -> ocp.Checkpointer:
    """One that does not wait for other processes of `jax.distributed`, which have engines of their own."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"jaxspec-{process}"
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    )


def open_orbax(path: Path) -> dict[str, OrbaxTensor]:
    """The arrays of a flat orbax checkpoint, not read yet.

    Raises:
      CheckpointError: not an orbax checkpoint, an unfinished one, or a nested one.
    """
    path = path.absolute()
    checkpointer = _checkpointer()
    with foreign(path, "not a complete orbax checkpoint"):
        item = checkpointer.metadata(path).item_metadata
    if item is None:
        raise CheckpointError(f"{path}: not a complete orbax checkpoint")
    tensors = {}
    for key, leaf in item.tree.items():
        if not hasattr(leaf, "shape"):
            raise CheckpointError(f"{path}: {key!r} is not an array")
        tensors[key] = OrbaxTensor(checkpointer, path, key, tuple(leaf.shape), np.dtype(leaf.dtype))
    return tensors


def write_orbax(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name; the folder appears only when it is complete.

    Raises:
      CheckpointError: an array has no elements, which orbax cannot store.
    """
    for name, array in arrays.items():
        if not array.size:
            raise CheckpointError(f"tensor {name!r} has no elements, which orbax cannot store")
    with own_settings(), _checkpointer() as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
