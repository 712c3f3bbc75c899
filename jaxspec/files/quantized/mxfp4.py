"""Weights in MXFP4: four-bit floats in blocks of 32 that share an exponent.

Source: OCP Microscaling Formats (MX) 1.0; the gpt-oss checkpoints, as openai/gpt-oss
`gpt_oss/torch/weights.py` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError

_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# Both values of each byte, the low four bits first.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Matrices [E, in, out], stored as `blocks` u8[E, out, in / 32, 16] and `scales` u8[E, out, in / 32]."""

    blocks: TensorSource
    scales: TensorSource
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)  # noqa: RUF009 - a dtype does not change

    @property
    def shape(self) -> tuple[int, ...]:
        count, out, groups, size = self.blocks.shape
        return count, groups * size * 2, out

    def read_packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Values u8[E, in / 2, out], two per byte, lower four bits first, and scales u8[E, in / 32, out]."""
        count, width, out = self.shape
        values = self.blocks.read().reshape(count, out, width // 2)
        return values.swapaxes(1, 2), self.scales.read().swapaxes(1, 2)

    def read(self) -> np.ndarray:
        blocks, scales = self.blocks.read(), self.scales.read()
        result = np.empty(self.shape, self.dtype)
        for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
            result[expert] = dequantize_mxfp4(block, scale).T  # exact: two bits of mantissa
        return result


@dataclass(frozen=True)
class Mxfp4Matrix:
    """A matrix [out, in], stored as `values` i8[out, in / 2] and `scales` float8_e8m0fnu[out, in / 32]."""

    values: TensorSource
    scales: TensorSource
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)  # noqa: RUF009 - a dtype does not change

    @property
    def shape(self) -> tuple[int, ...]:
        rows, half = self.values.shape
        return rows, 2 * half

    def read(self) -> np.ndarray:
        scales = self.scales.read().view(np.uint8)
        blocks = self.values.read().view(np.uint8).reshape(*scales.shape, 16)
        return dequantize_mxfp4(blocks, scales).astype(self.dtype)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """f32[..., in] from `blocks` u8[..., in / 32, 16] and biased exponents `scales` u8[..., in / 32]."""
    values = _PAIRS[blocks].reshape(*blocks.shape[:-1], -1)
    scaled = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*blocks.shape[:-2], -1)


def mxfp4_tensors(tensors: Mapping[str, TensorSource], name: str) -> dict[str, TensorSource]:
    """Replaces every pair X_blocks, X_scales by one tensor X, which is dequantized when it is read.

    Args:
      tensors: all tensors of a checkpoint, by name.
      name: the checkpoint, for messages.

    Raises:
      CheckpointError: one of a pair is missing, or their shapes do not match.
    """
    dequantized = dict(tensors)
    for key in tensors:
        if not key.endswith("_blocks"):
            continue
        stem = key.removesuffix("_blocks")
        blocks, scales = dequantized.pop(key), dequantized.pop(f"{stem}_scales", None)
        if scales is None:
            raise CheckpointError(f"{name}: tensor '{stem}_scales' is missing; {key!r} needs it")
        fits = len(blocks.shape) == 4 and blocks.shape[-1] == 16 and scales.shape == blocks.shape[:-1]
        if not fits or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
            raise CheckpointError(
                f"{name}: {key!r} of shape {list(blocks.shape)} and its scales of {list(scales.shape)} "
                "are not MXFP4, u8[E, out, in / 32, 16] and u8[E, out, in / 32]"
            )
        dequantized[stem] = Mxfp4Tensor(blocks, scales)
    return dequantized
