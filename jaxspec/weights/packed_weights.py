"""Packed weights: kept in their checkpoint's quantized format, so that a step reads fewer bytes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxspec_kernels.expert_matmul import (
    MAX_SCALE,
    Mxfp4Weight,
    PackedExperts,
    expert_matmul,
    pack_mxfp4,
    stack_experts,
    stack_mxfp4,
)
from jaxspec_kernels.fp8_matmul import fp8_matmul, runs_here
from jaxspec_kernels.matmul import BLOCK, MIN_WEIGHT_BYTES, PackedRows, PackedWeight, matmul, pack
from jaxspec_kernels.packed_matmul import CodedExperts, CodedWeight

from jaxspec.config import ConfigError
from jaxspec.files import TensorSource
from jaxspec.files.quantized.blocks import Blocks, BlockSource, MatrixStack, Rated, alike, round_to_blocks
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor
from jaxspec.files.quantized.quantize import RoundedTensor
from jaxspec.sharding import partition, placed, replicated
from jaxspec.weights.coded_weights import coded_experts, coded_sharding, coded_weight
from jaxspec.weights.expert_sources import InterleavedGateUp, Stacked, tensor_per_expert
from jaxspec.weights.parameters import Fused, Projection, Rows, Source, Whole, row_order

Activations = Literal["int8", "float32", "float8_e4m3fn"]
Packed = PackedWeight | PackedRows | PackedExperts | Mxfp4Weight | CodedWeight | CodedExperts


def keeps_packed(dtype: jnp.dtype, *, devices: int = 1) -> bool:
    """Whether there are kernels for packed weights, for a network of this dtype over so many devices."""
    if dtype == jnp.float32:
        return devices == 1 and matmul.why_not("numba") is None
    return dtype == jnp.bfloat16 and expert_matmul.why_not("triton") is None


def resolve_activations(asked: str | None, dtype: jnp.dtype, *, devices: int = 1) -> Activations:
    """The format of activations in products with packed weights: rounded to "int8", or "float32".

    Args:
      asked: `EngineConfig.cpu_activations`; None takes "int8" where that works.
      dtype: the network's dtype.
      devices: over which the network is split.

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
    elif devices > 1:
        reason = f"packed weights are for one device, and engine.tensor_parallel is {devices}"
    if asked is not None and reason:
        raise ConfigError(f"engine.cpu_activations is 'int8': {reason}")
    return "float32" if reason else "int8"


def resolve_gpu_activations(asked: str, dtype: jnp.dtype) -> Activations:
    """The format of activations in products of many rows with packed weights in FP8.

    Args:
      asked: `EngineConfig.gpu_activations`.
      dtype: the network's dtype.

    Raises:
      ConfigError: it does not work here.
    """
    reason = fp8_matmul.why_not("triton")
    if reason is not None:
        reason = f"its kernel {reason}"
    elif not runs_here():
        reason = "it needs a GPU that multiplies FP8, of compute capability 8.9 or later"
    elif dtype != jnp.bfloat16:
        reason = f"it needs engine.dtype 'bfloat16', not '{dtype}'"
    if reason:
        raise ConfigError(f"engine.gpu_activations is {asked!r}: {reason}")
    return "float8_e4m3fn"


def rounds_activations(weights: Any) -> bool:
    """Whether products with some weights of this tree round activations to 8 bits."""

    def is_packed(leaf: Any) -> bool:
        return isinstance(leaf, PackedWeight)

    leaves = filter(is_packed, jax.tree.leaves(weights, is_leaf=is_packed))
    return any(leaf.activations == "int8" for leaf in leaves)


def stored_weight(
    source: Source,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    stored: Sequence[TensorSource],
    *,
    codes: bool = False,
    activations: Activations = "float32",
    rounded: bool = False,
) -> Packed | None:
    """A parameter as a packed weight on the host; None if it has to be dense.

    Args:
      source: where the parameter is stored.
      shape, dtype: the parameter's. A bfloat16 network packs experts in MXFP4, and both in FP8
        and INT4.
      stored: its tensors.
      codes, activations, rounded: see `ModulePlan.read`.
    """
    if dtype == jnp.float32:
        if isinstance(source, Rows):
            columns = packed_weight(source.as_projection, shape[::-1], stored)
            return columns and PackedRows(columns)
        if isinstance(source, Stacked | Whole):
            return packed_experts(source, shape, stored, activations=activations, rounded=rounded)
        return packed_weight(source, shape, stored, activations=activations, rounded=rounded)
    if dtype != jnp.bfloat16:
        return None
    if not isinstance(source, Stacked) and (experts := mxfp4_experts(source, stored)) is not None:
        return experts
    # What is rounded while it is loaded is rounded in order to stay packed.
    if not codes and not all(isinstance(tensor, RoundedTensor) for tensor in stored):
        return None
    if not isinstance(source, Stacked) and isinstance(stored[0], MatrixStack):
        source, stored = _by_expert(source, shape), stored[0].matrices()
    if isinstance(source, Stacked):
        return coded_experts(source, shape, stored)
    weight = coded_weight(source, shape, stored)
    # Logits are read from rows as they are.
    if weight is None or activations != "float8_e4m3fn" or source.tensors[0][0] == "lm_head.weight":
        return weight
    return replace(weight, activations=activations)


def packed_sharding(
    weight: Packed, mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...] | None
) -> Packed | None:
    """The shardings of a packed weight's arrays; None if it has to be dense. Only a GPU's weights are split.

    Args:
      axes: the logical axes of the dense weight; None puts all of it on every device.
    """
    if isinstance(weight, CodedWeight | CodedExperts):
        return coded_sharding(weight, mesh, axes)
    if not isinstance(weight, Mxfp4Weight):
        return jax.tree.map(lambda _: replicated(mesh), weight)
    spec = partition(mesh, axes, weight.shape)
    experts, inputs, *outputs = spec
    # One block per scale is the unit of the split, so that inputs are cut only between blocks.
    values, scale = placed(mesh, PartitionSpec(experts, *outputs, inputs)), placed(mesh, spec)
    return Mxfp4Weight(values, scale)  # type: ignore[arg-type]


def floats_of(weight: Packed) -> list[np.ndarray]:
    """The float arrays of a packed weight, which could hold NaN or infinity."""
    if isinstance(weight, PackedExperts):
        return floats_of(weight.stack)
    if isinstance(weight, PackedRows):
        return floats_of(weight.columns)
    # The scale of MXFP4 that means NaN is above MAX_SCALE; those of codes were checked.
    if isinstance(weight, Mxfp4Weight | CodedWeight | CodedExperts) or weight.form == "mxfp4":
        return []
    values = [np.asarray(weight.values).view(ml_dtypes.bfloat16)] if weight.form == "bfloat16" else []
    factors = (np.asarray(array) for array in weight.factors if array is not None)
    return [*values, *(array for array in factors if array.dtype != np.int8)]


def mxfp4_experts(source: Source, stored: Sequence[TensorSource]) -> Mxfp4Weight | None:
    """Experts in MXFP4 for a GPU, as their tensor stores them, on the host; None if it has another format."""
    found = _mxfp4(source, stored)
    return found and pack_mxfp4(*found)


def _mxfp4(source: Source, stored: Sequence[TensorSource]) -> tuple[np.ndarray, np.ndarray] | None:
    """Values and scales as `pack_mxfp4` takes them; None if the tensor has another format."""
    if not isinstance(source, Whole) or not isinstance(stored[0], Mxfp4Tensor):
        return None
    values, scale = stored[0].read_packed()
    # Such a scale allows weights above 12, which no real network has and the kernel does not support.
    if scale.max(initial=0) > MAX_SCALE:
        return None
    return source.join([values]), source.join([scale])


def packed_experts(
    source: Source,
    shape: tuple[int, ...],
    stored: Sequence[TensorSource],
    *,
    activations: Activations = "float32",
    rounded: bool = False,
) -> PackedExperts | None:
    """Experts in their stored format for a CPU, on the host; None if they have to be dense.

    Args:
      source: where the parameter is stored; a `Stacked` of matrices, or one tensor with all experts.
      shape: the parameter's, which is float32.
      stored: its tensors.
      activations, rounded: see `ModulePlan.read`.
    """
    if math.prod(shape) * 4 < MIN_WEIGHT_BYTES:
        return None
    if not isinstance(source, Stacked) and isinstance(stored[0], MatrixStack):
        source, stored = _by_expert(source, shape), stored[0].matrices()
    if not isinstance(source, Stacked):
        found = _mxfp4(source, stored)
        return found and stack_mxfp4(*found, activations=activations)
    each = len(stored) // len(source.experts)
    parts = [(expert, stored[i * each : (i + 1) * each]) for i, expert in enumerate(source.experts)]

    def of_one_form(fits_6_bits: bool) -> list[PackedWeight] | None:
        experts: list[PackedWeight] = []
        for expert, tensors in parts:
            weight = _packed_matrix(
                expert,
                shape[1:],
                tensors,
                activations=activations,
                rounded=rounded,
                fits_6_bits=fits_6_bits,
            )
            if weight is None or (experts and not _have_one_form(weight, experts[0])):
                return None
            experts.append(weight)
        return experts

    # If the integers of only some experts fit into 6 bits, all are stored in 8.
    experts = of_one_form(True) or of_one_form(False)
    return stack_experts(experts) if experts else None


def _by_expert(source: Source, shape: tuple[int, ...]) -> Source:
    """The source of experts [E, M, 2, F] or [E, F, M] whose matrices are tensors of their own."""
    count, width, *outputs = shape
    if isinstance(source, InterleavedGateUp):
        return tensor_per_expert("", count, width, outputs[-1]).gate_up
    return tensor_per_expert("", count, outputs[-1], width).down


def _have_one_form(one: PackedWeight, other: PackedWeight) -> bool:
    """Whether two packed weights have the same kinds of arrays."""
    forms = ((w.form, w.block, *(array is None for array in w.factors)) for w in (one, other))
    return len(set(forms)) == 1


def packed_weight(
    source: Source,
    shape: tuple[int, ...],
    stored: Sequence[TensorSource],
    *,
    activations: Activations = "float32",
    rounded: bool = False,
) -> PackedWeight | None:
    """A matrix in its stored format, on the host; None if it has to be dense.

    Only `Projection` and `Fused` sources are packed: these are used in products, or column by column.

    Args:
      source: where the parameter is stored.
      shape: the parameter's, which is float32.
      stored: its tensors.
      activations, rounded: see `ModulePlan.read`.
    """
    if math.prod(shape) * 4 < MIN_WEIGHT_BYTES:
        return None
    return _packed_matrix(source, shape, stored, activations=activations, rounded=rounded)


def _packed_matrix(
    source: Source,
    shape: tuple[int, ...],
    stored: Sequence[TensorSource],
    *,
    activations: Activations,
    rounded: bool,
    fits_6_bits: bool = True,
) -> PackedWeight | None:
    """`packed_weight` for a matrix of any size; for `fits_6_bits` see `pack`."""
    if not isinstance(source, Projection | Fused) or not source.in_shape:
        return None
    found = [blocks for tensor in stored if (blocks := _blocks(tensor, rounded))]
    tensors = alike(found) if len(found) == len(stored) else None
    if tensors is None:
        return None
    order = row_order(source, [len(blocks.values) for blocks in tensors])
    in_order = np.array_equal(order, np.arange(len(order)))

    def outputs(arrays: Sequence[np.ndarray | None]) -> Any:
        """The rows of all tensors, in the order of the parameter's outputs."""
        known = [array for array in arrays if array is not None]
        if not known:
            return None
        rows = known[0] if len(known) == 1 else np.concatenate(known)
        return rows if in_order else rows[order]

    return pack(
        outputs([blocks.values for blocks in tensors]),
        outputs([blocks.scale for blocks in tensors]),
        outputs([blocks.offset for blocks in tensors]),
        shape,
        scale_unit=outputs([blocks.scale_unit for blocks in tensors]),
        offset_unit=outputs([blocks.offset_unit for blocks in tensors]),
        activations=activations,
        row_block=BLOCK // 2 if source.is_sensitive else BLOCK,
        fits_6_bits=fits_6_bits,
    )


def _blocks(tensor: TensorSource, rounded: bool) -> Blocks | None:
    blocks = tensor.read_blocks() if isinstance(tensor, BlockSource) else None
    is_small = blocks is not None and blocks.values.dtype == np.uint8
    if rounded and not is_small and tensor.shape[-1] % BLOCK == 0:
        importance = tensor.importance if isinstance(tensor, Rated) else None
        blocks = round_to_blocks(tensor.read().astype(np.float32), importance) or blocks
    if blocks is None and tensor.dtype == ml_dtypes.bfloat16:
        return Blocks(tensor.read())
    return blocks
