"""Matrices in eight-bit floats with one scale per block, as in the published DeepSeek-V3 checkpoints.

Source: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md` and `inference/fp8_cast_bf16.py`. Reading gives the same
bfloat16 values as that script.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.checkpoint import TensorSource
from jaxspec.checkpoints.errors import CheckpointError

_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class BlockFp8Tensor:
    """A matrix [out, in] whose values are multiplied by a scale per block.

    Attributes:
      values: float8[out, in].
      scales: f32[ceil(out / rows), ceil(in / columns)].
      block: (rows, columns) that share a scale.
      dtype: of the result.
    """

    values: TensorSource
    scales: TensorSource
    block: tuple[int, int]
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)  # noqa: RUF009 - a dtype does not change

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self) -> np.ndarray:
        result = self.values.read().astype(np.float32)
        rows, columns = self.block
        # One row of blocks at a time, since all scales repeated would take as much memory as the matrix.
        for i, scales in enumerate(self.scales.read().astype(np.float32)):
            result[i * rows : (i + 1) * rows] *= np.repeat(scales, columns)[: result.shape[1]]
        return result.astype(self.dtype)


def expand_block_fp8(
    tensors: Mapping[str, TensorSource], quantization: Mapping[str, Any], name: str
) -> dict[str, TensorSource]:
    """Replaces every pair X, X_scale_inv by one tensor X, which is dequantised when it is read.

    Args:
      tensors: all tensors of a checkpoint, by name.
      quantization: `quantization_config` of its `config.json`.
      name: the checkpoint, for messages.

    Raises:
      CheckpointError: a scale without a matrix, a matrix without a scale, a scale with a wrong shape, or no
        `weight_block_size`.
    """
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise CheckpointError(
            f"{name}: FP8 weights need weight_block_size, the rows and columns that share a scale; "
            f"it is {block!r}"
        )
    rows, columns = block
    expanded = dict(tensors)
    for key in tensors:
        if not key.endswith(_SUFFIX):
            continue
        scales, stem = expanded.pop(key), key.removesuffix(_SUFFIX)
        values = expanded.get(stem)
        if values is None:
            raise CheckpointError(f"{name}: tensor {stem!r} is missing; {key!r} is its scale")
        expected = tuple(-(-n // each) for n, each in zip(values.shape, block, strict=False))
        if len(values.shape) != 2 or scales.shape != expected:
            raise CheckpointError(
                f"{name}: {key!r} has shape {list(scales.shape)}, expected {list(expected)} for {stem!r} of "
                f"shape {list(values.shape)} in blocks of {block}"
            )
        expanded[stem] = BlockFp8Tensor(values, scales, (rows, columns))
    for key, tensor in expanded.items():
        if tensor.dtype.name.startswith("float8"):
            raise CheckpointError(f"{name}: tensor '{key}{_SUFFIX}' is missing; {key!r} is {tensor.dtype}")
    return expanded
