"""Matrices in eight-bit floats with a scale for each block: the published DeepSeek-V3 checkpoints.

Source: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md` and `inference/fp8_cast_bf16.py`, whose bfloat16 is what
is read here.
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
    """A matrix [out, in] out of `values` and of `scales` f32[out / rows, in / columns], rounded up.

    Attributes:
      block: rows and columns that share a scale, by which their values are multiplied.
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
        # A row of blocks at a time: the scales of all would be another matrix of the size.
        for i, scales in enumerate(self.scales.read().astype(np.float32)):
            result[i * rows : (i + 1) * rows] *= np.repeat(scales, columns)[: result.shape[1]]
        return result.astype(self.dtype)


def expand_block_fp8(
    tensors: Mapping[str, TensorSource], quantization: Mapping[str, Any], name: str
) -> dict[str, TensorSource]:
    """Tensors in which every pair X, X_scale_inv is one X, dequantised when it is read.

    Args:
      tensors: of a checkpoint.
      quantization: `quantization_config` of its `config.json`.
      name: the checkpoint's, for messages.

    Raises:
      CheckpointError: a scale belongs to no matrix or is of another shape, or the blocks have no size.
    """
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise CheckpointError(
            f"{name}: FP8 weights are read where weight_block_size says the rows and columns that share a "
            f"scale, and it is {block!r}"
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
                f"{name}: {key!r} has shape {list(scales.shape)}, and {stem!r} of {list(values.shape)} in "
                f"blocks of {block} needs {list(expected)}"
            )
        expanded[stem] = BlockFp8Tensor(values, scales, (rows, columns))
    return expanded
