"""Matrices in fewer bits than their values have as float32."""

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
    """scale * values + offset in float32, rounded once: what `TensorSource.read` returns.

    Attributes:
      values: i8[out, in] or, in 0 … 15, u8[out, in], either with a scale; or bf16[out, in]. With a scale of
        uint8, u8[out, in] holds the codes of MXFP4, and twice their values are what the scale multiplies.
      scale: f32[out, in / 32], one for 32 inputs, or f32[out, in / 16]; or None. scale * values is exact.
        For MXFP4 u8[out, in / 32], an exponent s that stands for 2 ** (s - 127), and 0 for 0.
      offset: as `scale`, or None.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        """That share a scale; 1 where there is none."""
        return 1 if self.scale is None else self.values.shape[1] // self.scale.shape[1]

    @property
    def is_mxfp4(self) -> bool:
        return self.scale is not None and self.scale.dtype == np.uint8

    def as_integers(self) -> "Blocks":
        """The same, MXFP4 in 8 bits with a scale of float32."""
        if self.scale is None or not self.is_mxfp4:
            return self
        return Blocks(_DOUBLED[self.values], (self.scale.astype(np.uint32) << 23).view(np.float32))

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Blocks":
        """With a change of rows applied to every array."""
        arrays = (self.values, self.scale, self.offset)
        return Blocks(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]


def round_to_blocks(matrix: np.ndarray) -> Blocks | None:
    """A matrix f32[out, in] rounded to ggml's Q8_0: 32 inputs share a scale of 11 bits.

    None for numbers that are too large for that, or no numbers.
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
    """A `TensorSource` that may hold blocks."""

    def read_blocks(self) -> Blocks | None:
        """The tensor as it is stored; None where that is not in blocks."""
        ...


def alike(tensors: Sequence[Blocks]) -> list[Blocks] | None:
    """The same tensors in one form: of the fewest inputs to a scale, in 8 bits or with offsets where one is.

    None for bfloat16 beside integers.
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
