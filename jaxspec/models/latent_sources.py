"""How checkpoints keep the projections of latent attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class SideBySide:
    """Matrices that read the same rows, [width, in] each, as one [in, sum of widths]."""

    kind: ClassVar[str] = "float"
    names: tuple[str, ...]
    in_width: int
    widths: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(
            (name, (width, self.in_width)) for name, width in zip(self.names, self.widths, strict=True)
        )

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(tensors).T

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        parts = np.split(value.T, np.cumsum(self.widths)[:-1])
        return [np.ascontiguousarray(part) for part in parts]


@dataclass(frozen=True)
class HeadRows:
    """Some of the rows that every head has in a matrix [H * rows, in], as [H, stop - start, in].

    Other parameters hold the matrix's other rows: one array of all of them would be sliced, and so copied,
    in every step.
    """

    kind: ClassVar[str] = "float"
    name: str
    heads: int
    rows: int
    start: int
    stop: int
    in_width: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (self.heads * self.rows, self.in_width)),)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return self._by_head(tensors[0])[:, self.start : self.stop]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        """The matrix with zeros in the rows of others."""
        ((_, shape),) = self.tensors
        whole = np.zeros(shape, value.dtype)
        self.put(whole, value)
        return [whole]

    def put(self, whole: np.ndarray, value: np.ndarray) -> None:
        """Writes the parameter's rows into the matrix."""
        self._by_head(whole)[:, self.start : self.stop] = value

    def _by_head(self, whole: np.ndarray) -> np.ndarray:
        return whole.reshape(self.heads, self.rows, self.in_width)
