"""Tensors of a GGUF, and tensors made from several of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import gguf
import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.gguf.blocks import unpack_ggml
from jaxspec.files.gguf.header import GGUFHeader, TensorInfo
from jaxspec.files.quantized.blocks import Blocks
from jaxspec.files.quantized.codes import Codes

PLAIN = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}

_CODES: dict[str, tuple[str, int | None]] = {
    "Q4_0": ("INT4", 8),
    "Q4_1": ("INT4", None),
    "Q4_K": ("INT4", None),
    "Q8_0": ("INT8", 0),
    "Q5_0": ("INT8", 0),
    "Q5_1": ("INT8", None),
    "Q2_K": ("INT8", None),
    "Q3_K": ("INT8", 4),
    "Q5_K": ("INT8", None),
    "Q6_K": ("INT8", 0),
    "IQ4_NL": ("INT8", 0),
    "IQ4_XS": ("INT8", 0),
}
"""The kind of a format's codes, and the code that stands for 0; None for offsets."""


@cache
def is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether this format can be read."""
    if kind in PLAIN:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF.

    Attributes:
      header: header of the file.
      info: shape, format and position of the tensor.
      interleaved_heads: number of heads whose rows the converter interleaved for rope; 0 for rows in Hugging
        Face's order.
      offset: number that the converter added to the values.
      tiled_inputs: r and H, if the inputs are values of r heads for each of H key heads and the converter put
        the first ones of all key heads first; (1, 1) for inputs in Hugging Face's order.
    """

    header: GGUFHeader
    info: TensorInfo
    interleaved_heads: int = 0
    offset: float = 0.0
    tiled_inputs: tuple[int, int] = (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        return PLAIN.get(self.info.quantization, np.dtype(np.float32))

    @property
    def packed(self) -> np.ndarray:
        """u8[..., bytes of a row], as stored."""
        return self.header.bytes_of(self.info).reshape(*self.shape[:-1], -1)

    def parts(self) -> list["GGUFTensor"]:
        """The slices along the first axis, as separate tensors."""
        count, *rest = self.shape
        info, size = self.info, self.info.nbytes // count
        return [
            replace(self, info=replace(info, shape=tuple(rest), offset=info.offset + i * size, nbytes=size))
            for i in range(count)
        ]

    def read_blocks(self) -> Blocks | None:
        """The integers and scales of a matrix; None for other ranks and for formats without them."""
        if len(self.shape) != 2 or self._cuts_groups:
            return None
        blocks = unpack_ggml(self.packed, self.info.quantization)
        if blocks is not None and self.interleaved_heads:
            blocks = blocks.map(lambda rows: _undo_interleaving(rows, self.interleaved_heads))
        if blocks is not None and self.tiled_inputs != (1, 1):
            # Scales may be in units for more inputs than a head has.
            blocks = blocks if blocks.is_mxfp4 else blocks.with_float_scales()
            blocks = blocks.map(lambda columns: undo_tiling(columns, *self.tiled_inputs, axis=1))
        return blocks

    @property
    def _cuts_groups(self) -> bool:
        """Whether inputs that share a scale belong to several heads, which are in another order."""
        heads = math.prod(self.tiled_inputs)
        return heads > 1 and self.shape[-1] % (32 * heads) != 0

    @property
    def form(self) -> str | None:
        """The name of the block format and its bits for a weight; None for floats."""
        kind = self.info.quantization
        if kind in PLAIN:
            return None
        values, size = gguf.GGML_QUANT_SIZES[kind]
        return f"{kind.name} ({8 * size / values:g} bits)"

    @property
    def kind(self) -> str:
        """The kind of codes that `read_codes` returns; for formats without it, their name."""
        name = self.info.quantization.name
        is_coded = name in _CODES and len(self.shape) == 2 and not self._cuts_groups
        return _CODES[name][0] if is_coded else name

    def read_codes(self) -> Codes:
        """A matrix in codes of four or eight bits, in groups of 32 or 16 inputs."""
        kind, zero = _CODES[self.info.quantization.name]
        blocks = self.read_blocks()
        assert blocks is not None
        with np.errstate(invalid="ignore"):  # NaN is found where the scales are used
            blocks = blocks.with_float_scales()
        assert blocks.scale is not None
        offset = blocks.offset if zero is None else None
        zeros = np.full(blocks.scale.shape, zero or 0, np.uint8) if kind == "INT4" or zero else None
        return Codes(blocks.values, blocks.scale, (1, blocks.inputs), zeros, offset=offset)

    def read(self) -> np.ndarray:
        """The values: unquantized formats as stored, quantized blocks as float32 by ggml's formulas."""
        if self.info.quantization in PLAIN:
            values = self.packed.view(self.dtype).reshape(self.shape).copy()
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # NaN is found where the values are used
                values = gguf.quants.dequantize(self.packed, self.info.quantization)
        if self.interleaved_heads:
            values = _undo_interleaving(values, self.interleaved_heads)
        if self.tiled_inputs != (1, 1):
            values = undo_tiling(values, *self.tiled_inputs, axis=values.ndim - 1)
        if self.offset:
            values = (values - values.dtype.type(self.offset)).astype(self.dtype)
        return values


def _undo_interleaving(rows: np.ndarray, heads: int) -> np.ndarray:
    """Restores rows from interleaved rope order (0, D/2, 1, D/2 + 1, …) to halves (0, 1, 2, …)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, D/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def undo_tiling(array: np.ndarray, copies: int, heads: int, *, axis: int = 0) -> np.ndarray:
    """Restores the order of an axis: all parts of the first head, and not the first part of all heads."""
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    return array.reshape(*before, copies, heads, -1, *after).swapaxes(axis, axis + 1).reshape(array.shape)


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor of `shape`, computed by `join` from other tensors."""

    sources: tuple[TensorSource, ...]
    shape: tuple[int, ...]
    join: Callable[..., np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """The sources' dtype, or float32 if they differ."""
        dtypes = {source.dtype for source in self.sources}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    @property
    def form(self) -> str | None:
        """That of the sources, if they have one block format."""
        forms = {getattr(source, "form", None) for source in self.sources}
        return forms.pop() if len(forms) == 1 else None

    def read(self) -> np.ndarray:
        return self.join(*(source.read().astype(self.dtype, copy=False) for source in self.sources))
