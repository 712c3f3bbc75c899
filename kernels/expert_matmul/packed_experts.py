"""Experts that stay in their checkpoint's quantized format, for products on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.expert_matmul.mxfp4_weight import BLOCK
from jaxspec_kernels.matmul.packed_weight import QUAD, TILE, PackedWeight, tiled
from jaxspec_kernels.packed_array import PackedArray


@partial(jax.tree_util.register_dataclass, data_fields=("stack",), meta_fields=("shape",))
@dataclass(frozen=True)
class PackedExperts(PackedArray):
    """Packed weights [E, M, out axes] of experts, which stand for exact float32 values.

    Attributes:
      stack: the experts' outputs side by side as one weight; each expert's are padded to whole tiles.
      shape: the shape of the weights.
    """

    stack: PackedWeight
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def dense(self) -> jax.Array:
        """The weights as float32, of `shape`."""
        count, width, *outputs = self.shape
        columns = self.stack.dense().reshape(width, count, -1)[..., : math.prod(outputs)]
        return jnp.moveaxis(columns, 1, 0).reshape(self.shape)


def stack_mxfp4(values: np.ndarray, scale: np.ndarray, *, activations: str) -> PackedExperts | None:
    """Packs experts in MXFP4 on the host; returns None if the scale of a weight is subnormal.

    Args:
      values: u8[E, M / 2, out axes], two inputs per byte, the first in the lower four bits.
      scale: u8[E, M / BLOCK, out axes]; none may be 255, which means NaN.
      activations: see `PackedWeight`.
    """
    count, half, *outs = values.shape
    width, outputs = 2 * half, math.prod(outs)
    tiles = -(-outputs // TILE)
    words = np.empty((count, tiles, width // (2 * QUAD), TILE), np.uint32)
    exponents = np.empty((count, tiles, width // BLOCK, TILE), np.uint8)
    for expert in range(count):
        pairs = np.moveaxis(values[expert], 0, -1).reshape(outputs, -1)
        stored = np.moveaxis(scale[expert], 0, -1).reshape(outputs, -1)
        # The scale of the doubled values has an exponent that is smaller by 1.
        is_small = stored < 2
        if is_small.any() and (pairs[is_small.repeat(BLOCK // 2, axis=1)] & 0x77).any():
            return None
        words[expert] = tiled(_by_quads(pairs).view(np.uint32)[..., 0])
        exponents[expert] = tiled(np.where(is_small, np.uint8(0), stored - 1))
    stack = PackedWeight(
        words.view(np.uint8).reshape(count * tiles, -1, TILE, QUAD),  # type: ignore[arg-type]
        exponents.reshape(count * tiles, -1, TILE),  # type: ignore[arg-type]
        None,
        (width, count * tiles * TILE),
        activations,
    )
    return PackedExperts(stack, (count, width, *outs))


def _by_quads(pairs: np.ndarray) -> np.ndarray:
    """Reorders u8[outputs, M / 2], adjacent inputs in a byte, into u8[outputs, M / 8, QUAD], as packed."""
    quads = pairs.reshape(len(pairs), -1, QUAD)
    lower, upper = quads[..., :2], quads[..., 2:]
    ordered = np.empty(quads.shape, np.uint8)
    ordered[..., 0::2] = lower & 15 | upper << 4
    ordered[..., 1::2] = lower >> 4 | upper & 0xF0
    return ordered


def stack_experts(experts: Sequence[PackedWeight]) -> PackedExperts:
    """Joins the packed weights [M, out axes] of single experts, all of one form, on the host."""
    first = experts[0]
    width, *outputs = first.shape
    tiles = len(experts) * first.values.shape[0]

    def stacked(arrays: Sequence[Any]) -> Any:
        # The scales of some experts may be exact in float16, and those of others not.
        return None if arrays[0] is None else np.concatenate(arrays, dtype=np.result_type(*arrays))

    stack = replace(
        first,
        values=stacked([expert.values for expert in experts]),
        scale=stacked([expert.scale for expert in experts]),
        offset=stacked([expert.offset for expert in experts]),
        scale_unit=stacked([expert.scale_unit for expert in experts]),
        offset_unit=stacked([expert.offset_unit for expert in experts]),
        shape=(width, tiles * TILE),
    )
    return PackedExperts(stack, (len(experts), width, *outputs))
