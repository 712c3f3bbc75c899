"""Matrices packed in blocks of integers that share a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

_DOUBLED = (2 * np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)).astype(
    np.int8
)


@dataclass(frozen=True)
class Blocks:
    """A packed matrix, equal to scale * values + offset in float32, rounded once.

    Attributes:
      values: i8[out, in], or u8[out, in] of 0 to 15, both with a scale; or bf16[out, in] without. With a
        uint8 scale, u8[out, in] are codes of MXFP4, and the scale multiplies twice their values.
      scale: f32[out, in / 32] or f32[out, in / 16], one for 32 or 16 inputs; or None. scale * values is
        exact in float32. For MXFP4 u8[out, in / 32]: s stands for 2 ** (s - 127), except that 0 stands for 0.
      offset: same shape as `scale`, or None.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        """The number of inputs that share a scale; 1 without a scale."""
        return 1 if self.scale is None else self.values.shape[1] // self.scale.shape[1]

    @property
    def is_mxfp4(self) -> bool:
        """Whether `values` are codes of MXFP4."""
        return self.scale is not None and self.scale.dtype == np.uint8

    def as_integers(self) -> "Blocks":
        """The same values; MXFP4 becomes int8 with a float32 scale."""
        if self.scale is None or not self.is_mxfp4:
            return self
        return Blocks(_DOUBLED[self.values], (self.scale.astype(np.uint32) << 23).view(np.float32))

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Blocks":
        """The same blocks with `change`, a permutation of rows, applied to every array."""
        arrays = (self.values, self.scale, self.offset)
        return Blocks(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]


def round_to_blocks(matrix: np.ndarray) -> Blocks | None:
    """Rounds a matrix f32[out, in] to ggml's Q8_0: 32 inputs share a float16 scale.

    Returns None if a value is NaN, infinite or too large for the format.
    """
    blocks = matrix.reshape(matrix.shape[0], -1, 32)
    with np.errstate(over="ignore"):
        scale = (np.abs(blocks).max(axis=-1) / 127).astype(np.float16).astype(np.float32)
    if not np.isfinite(scale).all():
        return None
    integers = np.rint(blocks / np.where(scale, scale, 1)[..., None])
    return Blocks(np.clip(integers, -127, 127).astype(np.int8).reshape(matrix.shape), scale)


@runtime_checkable
class BlockSource(Protocol):
    """A `TensorSource` that may be packed in blocks."""

    def read_blocks(self) -> Blocks | None:
        """The blocks as stored; None if the tensor is stored in another form."""
        ...


def alike(tensors: Sequence[Blocks]) -> list[Blocks] | None:
    """Converts tensors to a common form, without changing their values.

    The form has the fewest inputs per scale of any of them, int8 values unless all are uint8, and offsets if
    any has them. Returns None for a mix of bfloat16 and integers.
    """
    scaled = [blocks.scale is not None for blocks in tensors]
    if not any(scaled):
        return list(tensors)
    if not all(scaled):
        return None
    if not all(blocks.is_mxfp4 for blocks in tensors):
        tensors = [blocks.as_integers() for blocks in tensors]
    inputs = min(blocks.inputs for blocks in tensors)
    has_offset = any(blocks.offset is not None for blocks in tensors)
    dtype = np.uint8 if all(blocks.values.dtype == np.uint8 for blocks in tensors) else np.int8

    def each(blocks: Blocks) -> Blocks:
        assert blocks.scale is not None
        offset = np.zeros_like(blocks.scale) if has_offset and blocks.offset is None else blocks.offset
        times = blocks.inputs // inputs
        return Blocks(
            blocks.values.astype(dtype, copy=False),
            np.repeat(blocks.scale, times, axis=1),
            None if offset is None else np.repeat(offset, times, axis=1),
        )

    return [each(blocks) for blocks in tensors]
