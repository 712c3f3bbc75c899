"""Matrices in fewer bits than their values have as float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """scale * values + offset in float32, rounded once: what `TensorSource.read` returns.

    Attributes:
      values: i8[out, in] or, in 0 … 15, u8[out, in], either with a scale; or bf16[out, in].
      scale: f32[out, in / 32], one for 32 inputs, or f32[out, in / 16]; or None. scale * values is exact.
      offset: as `scale`, or None.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        """That share a scale; 1 where there is none."""
        return 1 if self.scale is None else self.values.shape[1] // self.scale.shape[1]

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Blocks":
        """With a change of rows applied to every array."""
        arrays = (self.values, self.scale, self.offset)
        return Blocks(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]


def round_to_blocks(matrix: np.ndarray) -> Blocks | None:
    """A matrix f32[out, in] rounded to ggml's Q4_1: 32 inputs share a scale and an offset of 11 bits.

    Both are fitted to the integers by least squares, twice. None for numbers that are too large for that, or
    no numbers.
    """
    blocks = matrix.reshape(matrix.shape[0], -1, 32)
    offset = blocks.min(axis=-1, keepdims=True)
    scale = (blocks.max(axis=-1, keepdims=True) - offset) / 15
    mean = blocks.mean(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(2):
            integers = _integers(blocks, scale, offset)
            centred = integers - integers.mean(axis=-1, keepdims=True)
            spread = (centred * centred).sum(axis=-1, keepdims=True)
            slope = (centred * (blocks - mean)).sum(axis=-1, keepdims=True)
            scale = slope / np.where(spread, spread, 1)
            offset = mean - scale * integers.mean(axis=-1, keepdims=True)
        scale, offset = (a.astype(np.float16).astype(np.float32) for a in (scale, offset))
        if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
            return None
        values = _integers(blocks, scale, offset).astype(np.uint8)
    return Blocks(values.reshape(matrix.shape), scale[..., 0], offset[..., 0])


def _integers(blocks: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """The integers in 0 … 15 that stand for the numbers best."""
    return np.clip(np.rint((blocks - offset) / np.where(scale, scale, 1)), 0, 15)


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
