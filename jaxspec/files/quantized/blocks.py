"""Matrices packed in blocks of integers that share a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource

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
        With `scale_unit` it is int8.
      offset: same shape and dtype as `scale`, or None.
      scale_unit: f32[out, in / 256], what 1 of an int8 scale stands for, in formats whose scales are integers
        themselves; otherwise None. The product is exact in float32.
      offset_unit: the same for `offset`.
    """

    values: np.ndarray
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None
    scale_unit: np.ndarray | None = None
    offset_unit: np.ndarray | None = None

    @property
    def inputs(self) -> int:
        """The number of inputs that share a scale; 1 without a scale."""
        return 1 if self.scale is None else self.values.shape[1] // self.scale.shape[1]

    @property
    def is_mxfp4(self) -> bool:
        """Whether `values` are codes of MXFP4."""
        return self.scale is not None and self.scale.dtype == np.uint8

    def with_float_scales(self) -> "Blocks":
        """The same values with float32 scales and offsets; those of MXFP4 become int8."""
        if self.scale is None:
            return self
        if self.is_mxfp4:
            return Blocks(_DOUBLED[self.values], (self.scale.astype(np.uint32) << 23).view(np.float32))
        return Blocks(
            self.values, _in_units(self.scale, self.scale_unit), _in_units(self.offset, self.offset_unit)
        )

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Blocks":
        """The blocks with `change` applied to every array."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return Blocks(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]


def _in_units(factors: np.ndarray | None, unit: np.ndarray | None) -> np.ndarray | None:
    """Scales or offsets as float32."""
    if factors is None or unit is None:
        return factors
    return factors * np.repeat(unit, factors.shape[1] // unit.shape[1], axis=1)


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
        """The matrices [out, in] as stored, expert by expert: gate and up of each, or down of each."""
        ...


def stack(pieces: Sequence[Blocks]) -> Blocks:
    """The rows of all pieces, which have one form."""
    if len(pieces) == 1:
        return pieces[0]
    arrays = zip(*([getattr(piece, field.name) for field in fields(Blocks)] for piece in pieces), strict=True)
    return Blocks(*(None if each[0] is None else np.concatenate(each) for each in arrays))  # type: ignore[arg-type]


def alike(tensors: Sequence[Blocks]) -> list[Blocks] | None:
    """Converts tensors to a common form, without changing their values.

    A scale is for as few inputs as in the tensor with the smallest blocks. Values are int8 unless all are
    uint8. There are offsets if any tensor has them, and units if all have them. Returns None for a mix of
    bfloat16 and integers.
    """
    scaled = [blocks.scale is not None for blocks in tensors]
    if not any(scaled):
        return list(tensors)
    if not all(scaled):
        return None
    have_units = all(blocks.scale_unit is not None for blocks in tensors)
    if not have_units and not all(blocks.is_mxfp4 for blocks in tensors):
        tensors = [blocks.with_float_scales() for blocks in tensors]
    inputs = min(blocks.inputs for blocks in tensors)
    has_offset = any(blocks.offset is not None for blocks in tensors)
    dtype = np.uint8 if all(blocks.values.dtype == np.uint8 for blocks in tensors) else np.int8

    def each(blocks: Blocks) -> Blocks:
        assert blocks.scale is not None
        offset, offset_unit, times = blocks.offset, blocks.offset_unit, blocks.inputs // inputs
        if has_offset and offset is None:
            offset = np.zeros_like(blocks.scale)
            offset_unit = None if blocks.scale_unit is None else np.zeros_like(blocks.scale_unit)
        return Blocks(
            blocks.values.astype(dtype, copy=False),
            np.repeat(blocks.scale, times, axis=1),
            None if offset is None else np.repeat(offset, times, axis=1),
            blocks.scale_unit,
            offset_unit,
        )

    return [each(blocks) for blocks in tensors]
