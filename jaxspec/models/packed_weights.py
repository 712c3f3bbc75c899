"""Weights that stay as their checkpoint stores them: the same values in fewer bytes to read."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxspec_kernels.expert_matmul import MAX_SCALE, Mxfp4Weight, expert_matmul, pack_mxfp4
from jaxspec_kernels.matmul import BLOCK, MIN_WEIGHT_BYTES, PackedWeight, matmul, pack

from jaxspec.checkpoints import TensorSource
from jaxspec.checkpoints.blocks import Blocks, BlockSource, alike, round_to_blocks
from jaxspec.checkpoints.mxfp4 import Mxfp4Tensor
from jaxspec.config import ConfigError
from jaxspec.models.expert_sources import InterleavedGateUp
from jaxspec.models.parameters import Fused, Projection, Source, Whole
from jaxspec.sharding import replicated, sharding

Activations = Literal["int8", "float32"]


def keeps_packed(dtype: jnp.dtype) -> bool:
    """Whether kernels that take packed weights run here, for a network of this dtype."""
    if dtype == jnp.float32:
        return matmul.why_not("numba") is None
    return dtype == jnp.bfloat16 and expert_matmul.why_not("triton") is None


def resolve_activations(asked: str | None, dtype: jnp.dtype) -> Activations:
    """What packed weights are multiplied with: rows rounded to "int8" or left as "float32".

    Args:
      asked: `EngineConfig.cpu_activations`; None for "int8" where that works.
      dtype: of the network.

    Raises:
      ConfigError: "int8" was asked for and does not work here.
    """
    if asked == "float32":
        return "float32"
    reason = matmul.why_not("numba")
    if reason is not None:
        reason = f"its kernel {reason}"
    elif dtype != jnp.float32:
        reason = f"it needs engine.dtype 'float32', not '{dtype}'"
    if asked is not None and reason:
        raise ConfigError(f"engine.cpu_activations is 'int8': {reason}")
    return "float32" if reason else "int8"


def stored_weight(
    source: Source,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    stored: Sequence[TensorSource],
    *,
    activations: Activations = "float32",
    rounded: bool = False,
) -> PackedWeight | Mxfp4Weight | None:
    """A parameter as its tensors are stored, on the host; None where it has to be dense.

    Args:
      source: of the parameter.
      shape, dtype: of the parameter. Matrices stay packed in float32, experts in bfloat16.
      stored: its tensors.
      activations, rounded: see `ModulePlan.read`.
    """
    if dtype == jnp.float32:
        return packed_weight(source, shape, stored, activations=activations, rounded=rounded)
    return packed_experts(source, stored) if dtype == jnp.bfloat16 else None


def packed_sharding(
    weight: PackedWeight | Mxfp4Weight, mesh: Mesh, axes: tuple[str | None, ...] | None
) -> PackedWeight | Mxfp4Weight:
    """The shardings of a packed weight's arrays: experts are split, other weights are for one device.

    Args:
      axes: of the weight that it stands for; None for whole on every device.
    """
    if not isinstance(weight, Mxfp4Weight):
        return jax.tree.map(lambda _: replicated(mesh), weight)
    scale = sharding(mesh, axes, weight.shape)
    experts, inputs, *outputs = scale.spec
    # The blocks of a scale are a unit of the axis, so that inputs are cut between two.
    return Mxfp4Weight(NamedSharding(mesh, PartitionSpec(experts, *outputs, inputs)), scale)  # type: ignore[arg-type]


def floats_of(weight: PackedWeight | Mxfp4Weight) -> list[np.ndarray]:
    """The parts of a weight of `stored_weight` that could be no numbers."""
    if isinstance(weight, Mxfp4Weight):
        return []  # a scale that stands for NaN is past MAX_SCALE
    values = [np.asarray(weight.values).view(ml_dtypes.bfloat16)] if weight.form == "bfloat16" else []
    return [*values, *(np.asarray(a) for a in (weight.scale, weight.offset) if a is not None)]


def packed_experts(source: Source, stored: Sequence[TensorSource]) -> Mxfp4Weight | None:
    """Experts as their tensor stores them in MXFP4, on the host; None where that is stored in another way."""
    if not isinstance(source, Whole | InterleavedGateUp) or not isinstance(stored[0], Mxfp4Tensor):
        return None
    values, scale = stored[0].read_packed()
    # A weight that could be 12 or more: no network has it.
    if scale.max(initial=0) > MAX_SCALE:
        return None
    return pack_mxfp4(source.join([values]), source.join([scale]))


def packed_weight(
    source: Source,
    shape: tuple[int, ...],
    stored: Sequence[TensorSource],
    *,
    activations: Activations = "float32",
    rounded: bool = False,
) -> PackedWeight | None:
    """A parameter as its tensors are stored, on the host; None where it has to be dense.

    Only matrices that products alone read are packed: those of the two sources named here.

    Args:
      source: of the parameter.
      shape: of the parameter, which is float32.
      stored: its tensors.
      activations, rounded: see `ModulePlan.read`.
    """
    if not isinstance(source, Projection | Fused) or not source.in_shape:
        return None
    if math.prod(shape) * 4 < MIN_WEIGHT_BYTES:
        return None
    found = [blocks for tensor in stored if (blocks := _blocks(tensor, rounded))]
    tensors = alike(found) if len(found) == len(stored) else None
    if tensors is None:
        return None
    width, inputs = math.prod(source.in_shape), tensors[0].inputs
    per_block = source.per_block(inputs)

    def scales(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [array for array in arrays if array is not None]
        return per_block.join(known).reshape(width // inputs, -1) if known else None

    return pack(
        source.join([blocks.values for blocks in tensors]).reshape(width, -1),
        scales([blocks.scale for blocks in tensors]),
        scales([blocks.offset for blocks in tensors]),
        shape,
        activations=activations,
    )


def _blocks(tensor: TensorSource, rounded: bool) -> Blocks | None:
    blocks = tensor.read_blocks() if isinstance(tensor, BlockSource) else None
    is_small = blocks is not None and blocks.values.dtype == np.uint8
    if rounded and not is_small and tensor.shape[-1] % BLOCK == 0:
        blocks = round_to_blocks(tensor.read().astype(np.float32)) or blocks
    if blocks is None and tensor.dtype == ml_dtypes.bfloat16:
        return Blocks(tensor.read())
    return blocks
