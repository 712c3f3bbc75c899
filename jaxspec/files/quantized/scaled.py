"""Matrices in eight-bit floats or integers beside their scales: one to a tensor, to a channel or to a block.

Sources: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md` and `inference/fp8_cast_bf16.py` (blocks);
compressed-tensors, `compressors/naive_quantized/base.py`; transformers 5.24,
`integrations/finegrained_fp8.py` (DeepSeek-V4); NVIDIA ModelOpt's unified checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.quantized.codes import KINDS, Codes, QuantizedTensor
from jaxspec.files.quantized.mxfp4 import Mxfp4Matrix

_SUFFIXES = ("_scale_inv", "_scale")
"""What the name of a matrix's scale adds to its own. Both are factors, whatever DeepSeek's is called."""
_ZERO = "_zero_point"
_V4_SCALE = ".scale"
_POWERS_OF_TWO = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True)
class ScaledTensor(QuantizedTensor):
    """A matrix whose codes are stored as they are.

    Attributes:
      key: its name, for messages.
      values: float8_e4m3fn or i8[out, in].
      scale: floats, in any shape with one for each block.
      zero: in the scale's shape, or None. Only integers in i8 have others than zeros.
    """

    key: str

    values: TensorSource
    scale: TensorSource
    zero: TensorSource | None = None

    @property
    def kind(self) -> str:
        return KINDS[self.values.dtype]

    def read_codes(self) -> Codes:
        shape = _blocks(self.shape, self.block)
        zero = self._zeros(shape)
        scale = self.scale.read().reshape(shape)
        if scale.dtype == _POWERS_OF_TWO:
            scale = scale.astype(np.float32)
        return Codes(self.values.read(), scale, self.block, zero)

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """The zero points; None if they are all zero, as those of symmetric schemes that some tools write."""
        zero = None if self.zero is None else self.zero.read().reshape(shape)
        if zero is None or not zero.any():
            return None
        if zero.dtype != np.int8 or self.values.dtype != np.int8:
            raise CheckpointError(
                f"the zero points of {self.key!r} are {zero.dtype}, not all zero, and beside "
                f"{self.values.dtype}"
            )
        return zero


def scaled_tensors(
    tensors: Mapping[str, TensorSource], block: tuple[int, int] | None, name: str
) -> dict[str, TensorSource]:
    """Replaces every matrix of codes and its scale by one tensor, which is dequantized when it is read.

    Args:
      tensors: all tensors of a checkpoint, by name.
      block: (rows, columns) that share a scale, in the matrices that have more than one to a channel.
      name: the checkpoint, for messages.

    Raises:
      CheckpointError: a scale without a matrix, a matrix without a scale, or a scale of another shape.
    """
    dequantized = dict(tensors)
    for key, values in tensors.items():
        suffix = next((s for s in _SUFFIXES if key.endswith((f".weight{s}", _SUFFIXES[0]))), None)
        stem = key.removesuffix(suffix or "")
        if suffix and stem not in tensors:
            raise CheckpointError(f"{name}: tensor {stem!r} is missing; {key!r} is its scale")
        if key.endswith(_ZERO) and key.removesuffix(_ZERO) in tensors:
            continue
        if suffix and values.dtype == _POWERS_OF_TWO:
            continue
        if values.dtype not in KINDS:
            if values.dtype.name.startswith("float8"):
                raise CheckpointError(
                    f"{name}: {key!r} is {values.dtype}, which is not supported: float8_e4m3fn is"
                )
            continue
        found = [f"{key}{suffix}" for suffix in _SUFFIXES if f"{key}{suffix}" in tensors]
        if not found:
            wanted = f"{key}{_SUFFIXES[0] if block else _SUFFIXES[1]}"
            raise CheckpointError(f"{name}: tensor {wanted!r} is missing; {key!r} is {values.dtype}")
        scale, zero = dequantized.pop(found[0]), dequantized.pop(f"{key}{_ZERO}", None)
        shared = _shared(values, scale, block, key, found[0], name)
        if zero is not None and zero.shape != scale.shape:
            raise CheckpointError(
                f"{name}: '{key}{_ZERO}' is {zero.dtype} of shape {list(zero.shape)}, expected int8 of "
                f"{list(scale.shape)}"
            )
        dequantized[key] = ScaledTensor((values.shape[0], values.shape[1]), shared, key, values, scale, zero)
    return dequantized


def with_usual_scales(tensors: Mapping[str, TensorSource], name: str) -> dict[str, TensorSource]:
    """Renames the scales of pairs X.weight, X.scale, as DeepSeek-V4 calls them, for `scaled_tensors`.

    Pairs whose weights are 8-bit integers, each of them two four-bit floats, become one tensor.

    Args:
      tensors, name: see `scaled_tensors`.

    Raises:
      CheckpointError: a scale without a matrix, or four-bit floats with a scale of another shape or dtype.
    """
    renamed = dict(tensors)
    for key, scale in tensors.items():
        stem = f"{key.removesuffix(_V4_SCALE)}.weight"
        values = tensors.get(stem)
        if not key.endswith(_V4_SCALE) or (values is None and scale.dtype != _POWERS_OF_TWO):
            continue
        if values is None:
            raise CheckpointError(f"{name}: tensor {stem!r} is missing; {key!r} is its scale")
        del renamed[key]
        if values.dtype != np.int8:
            renamed[f"{stem}{_SUFFIXES[0]}"] = scale
            continue
        expected = _blocks(values.shape, (1, 16)) if len(values.shape) == 2 else ()
        if not expected or values.shape[1] % 16 or (scale.dtype, scale.shape) != (_POWERS_OF_TWO, expected):
            raise CheckpointError(
                f"{name}: {stem!r} of shape {list(values.shape)} and its scale, {scale.dtype} of shape "
                f"{list(scale.shape)}, are not MXFP4: int8[out, in / 2] and float8_e8m0fnu[out, in / 32]"
            )
        renamed[stem] = Mxfp4Matrix(values, scale)
    return renamed


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // each) for n, each in zip(shape, block, strict=True))


def _shared(
    values: TensorSource,
    scale: TensorSource,
    block: tuple[int, int] | None,
    key: str,
    scale_key: str,
    name: str,
) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    fits = len(values.shape) == 2 and 0 not in values.shape and scale.dtype.kind not in "biu"
    if fits:
        rows, columns = values.shape
        # ModelOpt writes blocks with axes of size 1 between them.
        shape = tuple(n for n in scale.shape if n != 1)
        options = [(rows, columns), (1, columns)] if block is None else [block, (rows, columns), (1, columns)]
        for option in options:
            if shape == tuple(n for n in _blocks(values.shape, option) if n != 1):
                return option
    expected = _blocks(values.shape, block) if fits and block else (values.shape[0], 1) if fits else ()
    raise CheckpointError(
        f"{name}: {scale_key!r} is {scale.dtype} of shape {list(scale.shape)}, expected floats of "
        f"{list(expected)} for {key!r} of shape {list(values.shape)}"
        + (f" in blocks of {list(block)}" if block else "")
    )
