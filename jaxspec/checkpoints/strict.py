"""Exact loading: checks that every tensor is used once or ignored by name, before any is read."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.checkpoint import Checkpoint, TensorSource
from jaxspec.checkpoints.errors import CheckpointError


class StrictTensors:
    """Gives out the tensors of a checkpoint and reports those left over.

    `take` checks and returns a tensor without reading it. A loader takes all tensors that it needs, calls
    `finish`, and only then reads them, so nothing large is allocated for a checkpoint that does not fit:

        tensors = StrictTensors(checkpoint)
        fc = tensors.take("fc.weight", (576, 1728))
        tensors.ignore("rotary_emb.inv_freq")
        tensors.finish()
        array = fc.read()
    """

    def __init__(self, checkpoint: Checkpoint):
        self._name = checkpoint.name
        self._tensors: Mapping[str, TensorSource] = checkpoint.tensors
        self._open = set(checkpoint.tensors)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor, whether or not it was taken."""
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], kind: str = "float") -> TensorSource:
        """The tensor of that name, not read yet.

        Args:
          name: as in `Checkpoint.tensors`.
          shape: the shape that the model needs.
          kind: "float", "int" or "bool", of any width.

        Raises:
          CheckpointError: it is missing, has another shape or kind, or was taken before.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._name}: tensor {name!r} is missing; expected shape {list(shape)}")
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self._name}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if _kind(tensor.dtype) != kind:
            raise CheckpointError(f"{self._name}: tensor {name!r} is {tensor.dtype}, expected {kind}")
        if name not in self._open:
            raise CheckpointError(f"{self._name}: tensor {name!r} is used twice")
        self._open.remove(name)
        return tensor

    def ignore(self, *patterns: str) -> None:
        """Marks tensors as intentionally unused; `*` in a pattern matches any text."""
        self._open = {n for n in self._open if not any(fnmatchcase(n, p) for p in patterns)}

    def finish(self) -> None:
        """Checks that no tensor is left.

        Raises:
          CheckpointError: a tensor was neither taken nor ignored.
        """
        if not self._open:
            return
        first, *others = sorted(self._open)
        more = f" and {len(others)} more" if others else ""
        raise CheckpointError(
            f"{self._name}: spare tensor {first!r} of shape {list(self._tensors[first].shape)}{more}: "
            f"nothing in the model takes it"
        )


def _kind(dtype: np.dtype) -> str:
    if dtype.kind in "biu":
        return "bool" if dtype.kind == "b" else "int"
    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, KeyError):
        return str(dtype)
    return "float"
