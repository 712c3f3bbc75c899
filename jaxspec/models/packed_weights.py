"""Weights that stay as their checkpoint stores them: the same float32 values in fewer bytes to read."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from jaxspec_kernels.matmul import BLOCK, MIN_WEIGHT_BYTES, PackedWeight, pack

from jaxspec.checkpoints import TensorSource
from jaxspec.checkpoints.blocks import Blocks, BlockSource
from jaxspec.models.parameters import FusedGateUp, FusedQKV, Projection, Source


def packed_weight(
    source: Source, shape: tuple[int, ...], stored: Sequence[TensorSource]
) -> PackedWeight | None:
    """A parameter as its tensors are stored, on the host; None where it has to be dense.

    Only matrices that products alone read are packed: those of the three sources named here.

    Args:
      source: of the parameter.
      shape: of the parameter, which is float32.
      stored: its tensors.
    """
    if not isinstance(source, Projection | FusedQKV | FusedGateUp) or source.in_width is None:
        return None
    if math.prod(shape) * 4 < MIN_WEIGHT_BYTES:
        return None
    width, tensors = source.in_width, [blocks for tensor in stored if (blocks := _blocks(tensor))]
    kinds = {(blocks.values.dtype, blocks.offset is None) for blocks in tensors}
    if len(tensors) < len(stored) or len(kinds) > 1:
        return None
    per_block = source.per_block(BLOCK)

    def scales(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [array for array in arrays if array is not None]
        return per_block.join(known).reshape(width // BLOCK, -1) if known else None

    return pack(
        source.join([blocks.values for blocks in tensors]).reshape(width, -1),
        scales([blocks.scale for blocks in tensors]),
        scales([blocks.offset for blocks in tensors]),
        shape,
    )


def _blocks(tensor: TensorSource) -> Blocks | None:
    blocks = tensor.read_blocks() if isinstance(tensor, BlockSource) else None
    if blocks is None and tensor.dtype == ml_dtypes.bfloat16:
        return Blocks(tensor.read())
    return blocks
