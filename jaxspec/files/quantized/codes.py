"""Matrices in eight-bit floats or small integers with scales, whatever the format that stores them."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource, usual_dtype

# Rows that are dequantized at once, since all scales repeated would take as much memory as the matrix.
_ROWS = 128


@dataclass(frozen=True)
class Codes:
    """A matrix [out, in] of codes: a weight is (code - zero) * scale + offset, rounded once to float32.

    Attributes:
      values: float8_e4m3fn, i8 or u8[out, in].
      scale: floats [ceil(out / rows), ceil(in / columns)].
      block: (rows, columns) that share a scale.
      zero: integers of the scale's shape; None for codes that stand for themselves.
      group: i32[in], the column of `scale` of every input; None for input // columns.
      offset: f32 of the scale's shape; None for no offsets.
    """

    values: np.ndarray
    scale: np.ndarray
    block: tuple[int, int]
    zero: np.ndarray | None = None
    group: np.ndarray | None = None
    offset: np.ndarray | None = None

    def dense(self) -> np.ndarray:
        """The weights, f32[out, in]."""
        rows, columns = self.block
        group = np.arange(self.values.shape[1]) // columns if self.group is None else self.group
        result = self.values.astype(np.float32)
        for start in range(0, len(result), _ROWS):
            part = result[start : start + _ROWS]
            at = np.arange(start, start + len(part)) // rows
            if self.zero is not None:
                part -= self.zero[at][:, group]
            part *= self.scale[at].astype(np.float32)[:, group]
            if self.offset is not None:
                part += self.offset[at][:, group]
        return result


@runtime_checkable
class CodeSource(Protocol):
    """A `TensorSource` of a matrix in codes.

    Attributes:
      kind: the kind of its codes: "FP8", "INT8" or "INT4", or another that has no `Codes`.
    """

    @property
    def kind(self) -> str: ...

    def read_codes(self) -> Codes:
        """The codes and scales as they are stored."""
        ...


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A matrix that a checkpoint stores in codes; a `TensorSource` whose values are float32.

    Attributes:
      shape: (out, in).
      block: (rows, columns) that share a scale.
    """

    dtype: ClassVar[np.dtype] = np.dtype(np.float32)
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of its codes: "FP8", "INT8" or "INT4"."""

    @abstractmethod
    def read_codes(self) -> Codes:
        """The codes and scales as they are stored.

        Raises:
          CheckpointError: they do not belong together.
        """

    def read(self) -> np.ndarray:
        return self.read_codes().dense()

    @property
    def form(self) -> str:
        """The format in words, such as "INT4 in groups of 128"."""
        rows, columns = self.block
        if self.block == self.shape:
            return f"{self.kind} by tensor"
        if rows > 1:
            return f"{self.kind} in blocks of {rows} x {columns}"
        return (
            f"{self.kind} by channel" if columns == self.shape[1] else f"{self.kind} in groups of {columns}"
        )


def stored_forms(tensors: Mapping[str, TensorSource]) -> tuple[str, ...]:
    """A line for every format of quantized matrices, and one for the rest; empty if nothing is quantized."""
    forms = {name: getattr(tensor, "form", None) for name, tensor in tensors.items()}
    counts = Counter(form for form in forms.values() if form is not None)
    if not counts:
        return ()
    wide = [name for name, form in forms.items() if form is None]
    matrices = sorted(name for name in wide if len(tensors[name].shape) > 1)
    vectors = len(wide) - len(matrices)
    dtype = usual_dtype(tensors[name] for name in wide)
    shown = [*matrices[:3], *([f"{len(matrices) - 3} other matrices"] if len(matrices) > 3 else [])]
    lines = [f"{form}: {count} matrices" for form, count in sorted(counts.items())]
    return (*lines, f"{dtype}: {', '.join([*shown, f'{vectors} vectors'])}")


KINDS = {np.dtype(ml_dtypes.float8_e4m3fn): "FP8", np.dtype(np.int8): "INT8"}
"""The kinds of codes that are stored as they are, by dtype."""
