"""Matrices in fewer bits than their values have as float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """scale * values + offset in float32, rounded once: what `TensorSource.read` returns.

    Attributes:
      values: i8[out, in] with a scale, u8[out, in] in 0 … 15 with a scale and an offset, or bf16[out, in].
      scale: f32[out, in / 32], one for 32 inputs, or f32[out, in / 16]; or None. scale * values is exact.
      offset: as `scale`, or None.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Blocks":
        """With a change of rows applied to every array."""
        arrays = (self.values, self.scale, self.offset)
        return Blocks(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]


@runtime_checkable
class BlockSource(Protocol):
    """A `TensorSource` that may hold blocks."""

    def read_blocks(self) -> Blocks | None:
        """The tensor as it is stored; None where that is not in blocks."""
        ...
