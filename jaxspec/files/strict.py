"""Exact loading: checks that every tensor is used once or ignored by name, before any is read."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import Checkpoint, TensorSource
from jaxspec.files.errors import CheckpointError


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
            raise CheckpointError(
                f"{self._name}: tensor {name!r} is missing; expected shape {list(shape)}"
                + hint_of_prefix(self._tensors, name)
            )
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
        """Checks that no tensor is left but biases of zeros, as quantizers write them; only these are read.

        Raises:
          CheckpointError: a tensor was neither taken nor ignored.
        """
        spare = [name for name in sorted(self._open) if not self._is_zero_bias(name)]
        if not spare:
            return
        first, *others = spare
        more = f" and {len(others)} more" if others else ""
        raise CheckpointError(
            f"{self._name}: spare tensor {first!r} of shape {list(self._tensors[first].shape)}{more}: "
            f"nothing in the model takes it"
        )

    def _is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, of a weight that was taken."""
        suffix = next((s for s in (".bias", "_bias") if name.endswith(s)), None)
        if suffix is None:
            return False
        weight = f"{name.removesuffix(suffix)}{'.weight' if suffix == '.bias' else ''}"
        tensor = self._tensors[name]
        if weight not in self._tensors or weight in self._open or _kind(tensor.dtype) != "float":
            return False
        return not np.any(tensor.read())


def hint_of_prefix(tensors: Mapping[str, TensorSource], *parts: str) -> str:
    """What all names begin with, for the message about a tensor that is missing; "" if that is not the cause.

    Args:
      tensors: a checkpoint's, by name.
      parts: how the missing tensors' names begin, the likeliest first.
    """
    for part in parts:
        found = next((name for name in tensors if f".{part}" in name), "")
        prefix = found[: found.find(f".{part}") + 1]
        if prefix and all(name.startswith(prefix) for name in tensors):
            return f"; the names of all tensors begin with {prefix!r}, which has to go"
    return ""


def _kind(dtype: np.dtype) -> str:
    if dtype.kind in "biu":
        return "bool" if dtype.kind == "b" else "int"
    try:
        ml_dtypes.finfo(dtype)
    except (ValueError, KeyError):
        return str(dtype)
    return "float"
