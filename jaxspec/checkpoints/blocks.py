"""Matrices packed in blocks of integers that share a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.checkpoint import TensorSource

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


def round_to_blocks(matrix: np.ndarray, importance: np.ndarray | None = None) -> Blocks | None:
    """Rounds a matrix f32[out, in] to ggml's Q4_1: 32 inputs share a float16 scale and a float16 offset.

    Both are fitted by least squares. Returns None if a value is NaN, infinite or too large for the format.

    Args:
      matrix: the matrix.
      importance: f32[in], not negative: how much the error of each input's weights counts. None counts all
        alike.
    """
    blocks = matrix.reshape(matrix.shape[0], -1, 32)
    counts = np.ones(matrix.shape[1], np.float32) if importance is None else importance
    # A block whose inputs all count nothing is fitted too.
    share = (counts + 1e-6 * (np.max(counts) or 1)).reshape(-1, 32)
    share = share / share.sum(axis=-1, keepdims=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return (share * values).sum(axis=-1, keepdims=True)

    offset = blocks.min(axis=-1, keepdims=True)
    scale = (blocks.max(axis=-1, keepdims=True) - offset) / 15
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(2):
            integers = _integers(blocks, scale, offset)
            centred = integers - mean(integers)
            spread = mean(centred * centred)
            scale = mean(centred * blocks) / np.where(spread, spread, 1)
            offset = mean(blocks) - scale * mean(integers)
        scale, offset = (a.astype(np.float16).astype(np.float32) for a in (scale, offset))
        if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
            return None
        values = _integers(blocks, scale, offset).astype(np.uint8)
    return Blocks(values.reshape(matrix.shape), scale[..., 0], offset[..., 0])


def _integers(blocks: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """The nearest integers in 0 … 15."""
    return np.clip(np.rint((blocks - offset) / np.where(scale, scale, 1)), 0, 15)


@runtime_checkable
class Rated(Protocol):
    """A `TensorSource` that knows how much its inputs count when it is rounded.

    Attributes:
      importance: see `round_to_blocks`.
    """

    @property
    def importance(self) -> np.ndarray | None: ...


@runtime_checkable
class BlockSource(Protocol):
    """A `TensorSource` that may be packed in blocks."""

    def read_blocks(self) -> Blocks | None:
        """The blocks as stored; None if the tensor is stored in another form."""
        ...


@runtime_checkable
class MatrixStack(Protocol):
    """A `TensorSource` of matrices of all experts of a layer, made from matrices that may be packed."""

    def matrices(self) -> list[TensorSource]:
        """The matrices [out, in] as stored: expert by expert, of each its gate and up or its down."""
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
