"""Matrices that stay in a checkpoint's codes of eight or four bits on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxspec_kernels.packed_matmul import CodedExperts, CodedWeight, pack_codes, stack_codes

from jaxspec.files import TensorSource
from jaxspec.files.quantized.codes import Codes, CodeSource
from jaxspec.sharding import partition, placed, replicated
from jaxspec.weights.expert_sources import Stacked
from jaxspec.weights.parameters import Fused, Projection, Source, row_order

_ZERO = 8


def coded_experts(
    source: Source, shape: tuple[int, ...], stored: Sequence[TensorSource]
) -> CodedExperts | None:
    """Experts of a bfloat16 network in their stored codes, on the host; None if they have to be dense.

    Args:
      source, stored: as of `coded_weight`; only matrices that are tensors of their own stay packed.
      shape: the parameter's, [E, M, out axes].
    """
    if not isinstance(source, Stacked):
        return None
    each = len(stored) // len(source.experts)
    parts = [(expert, stored[i * each : (i + 1) * each]) for i, expert in enumerate(source.experts)]
    experts: list[CodedWeight] = []
    for expert, tensors in parts:
        weight = coded_weight(expert, shape[1:], tensors, keep_zero=True)
        if weight is None:
            return None
        experts.append(weight)
    return stack_codes(experts)


def coded_weight(
    source: Source, shape: tuple[int, ...], stored: Sequence[TensorSource], *, keep_zero: bool = False
) -> CodedWeight | None:
    """A matrix of a bfloat16 network in its stored codes, on the host; None if it has to be dense.

    Args:
      source: where the parameter is stored; only `Projection` and `Fused` are used in products.
      shape: the parameter's.
      stored: its tensors.
      keep_zero: keep zero points even if all of them are 8, where the format has any.
    """
    if not isinstance(source, Projection | Fused) or not source.in_shape:
        return None
    if source.tensors[0][0].endswith("embed_tokens.weight"):
        return None  # a table that is read by columns, too
    quantized = [tensor for tensor in stored if isinstance(tensor, CodeSource)]
    kinds = {tensor.kind for tensor in quantized}
    if len(quantized) < len(stored) or not (kinds == {"FP8"} or kinds <= {"INT4", "INT8"}):
        return None
    tensors = [tensor.read_codes() for tensor in quantized]
    groups = [codes.group for codes in tensors]
    inputs: np.ndarray | None = None
    if any(group is not None for group in groups):
        inputs = _grouped_inputs(groups, tensors[0].block[1])
        if inputs is None:
            return None
        tensors = [replace(codes, values=codes.values[:, inputs], group=None) for codes in tensors]
    width = tensors[0].values.shape[1]
    columns = {min(codes.block[1], width) for codes in tensors}
    offsets = {codes.offset is not None for codes in tensors}
    if kinds != {"FP8"} and (kinds != {"INT4"} or len(columns) > 1 or len(offsets) > 1):
        found = _as_int8(tensors, width)
        if found is None:
            return None
        kinds, tensors, columns = {"INT8"}, found, {found[0].block[1]}
    values = np.concatenate([codes.values.view(np.uint8) for codes in tensors])
    # Loading reports codes and scales that stand for no number when it dequantizes them.
    if len(columns) > 1 or (kinds == {"FP8"} and ((values & 127) == 127).any()):
        return None
    order = row_order(source, [len(codes.values) for codes in tensors])
    scale = _scales(tensors, order, shape[-1])
    if not np.isfinite(scale).all():
        return None
    zero: Any = None
    if kinds == {"INT4"}:
        zero = np.concatenate([_each_output(codes, codes.zero) for codes in tensors])[order]
        has_own = any(getattr(tensor, "zero", None) is not None for tensor in quantized)
        zero = None if (zero == _ZERO).all() and not (keep_zero and has_own) else zero
    offset: Any = None
    if tensors[0].offset is not None:
        offset = np.concatenate([_each_output(codes, codes.offset) for codes in tensors])[order]
        if not np.isfinite(offset).all():
            return None
    if not np.array_equal(order, np.arange(len(order))):
        values = values[order]
    if kinds != {"INT4"}:
        values = values.view(ml_dtypes.float8_e4m3fn if kinds == {"FP8"} else np.int8)
    inner = len(source.in_shape)
    return pack_codes(values, scale, zero, shape[inner:], shape[1:inner], inputs, offset)


def _as_int8(tensors: Sequence[Codes], width: int) -> list[Codes] | None:
    """Integers as int8 without zero points, in groups of one size, all with offsets or none; None if they do
    not fit."""
    columns = min(min(codes.block[1], width) for codes in tensors)
    has_offset = any(codes.offset is not None for codes in tensors)
    result: list[Codes] = []
    for codes in tensors:
        own = min(codes.block[1], width)
        if own % columns or width % own:
            return None
        values = codes.values
        if codes.zero is not None:
            zero = np.repeat(_each_output(codes, codes.zero), own, axis=1)
            wide = values.astype(np.int16) - zero
            values = wide.astype(np.int8)
            if (values != wide).any():
                return None
        factors = [codes.scale, np.zeros_like(codes.scale) if codes.offset is None else codes.offset]
        scale, offset = (np.repeat(each, own // columns, axis=1) for each in factors)
        block = codes.block[0], columns
        result.append(Codes(values.view(np.int8), scale, block, offset=offset if has_offset else None))
    return result


def _grouped_inputs(groups: Sequence[np.ndarray | None], size: int) -> np.ndarray | None:
    """i32[in], the inputs group by group; None if tensors differ in it, or groups in their sizes."""
    first = groups[0]
    if first is None or not all(group is not None and np.array_equal(group, first) for group in groups):
        return None
    return np.argsort(first, kind="stable").astype(np.int32) if set(np.bincount(first)) == {size} else None


def _scales(tensors: Sequence[Codes], order: np.ndarray, last: int) -> np.ndarray:
    """f32[outputs / rows, groups] in the order of the parameter's outputs, whose last axis is `last`."""
    rows = math.gcd(*(each for codes in tensors for each in (codes.block[0], len(codes.values))))
    blocks = order[::rows]
    if last % rows or not np.array_equal(
        order, (blocks[:, None] + np.arange(rows)).reshape(-1)[: len(order)]
    ):
        rows = 1
    scales = np.concatenate([_each_output(codes, codes.scale)[::rows] for codes in tensors])
    return scales[order[::rows] // rows].astype(np.float32)


def _each_output(codes: Codes, factors: Any) -> Any:
    """Scales or zero points [outputs, groups]."""
    return np.repeat(factors, codes.block[0], axis=0)[: len(codes.values)]


def coded_sharding(
    weight: CodedWeight | CodedExperts, mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...] | None
) -> CodedWeight | CodedExperts | None:
    """The shardings of a weight's arrays; None if the devices' parts would cut a block, or a scale's inputs.

    Args:
      axes: the logical axes of the dense weight; None puts all of it on every device.
    """
    spec = tuple(partition(mesh, axes, weight.shape))
    count = 1 if isinstance(weight, CodedExperts) else 0  # axes before the inputs
    inner = 0 if isinstance(weight, CodedExperts) else len(weight.inner)
    first, inputs, outputs = spec[:count], spec[count], spec[count + 1 + inner :]
    groups, *rows = weight.scale.shape[count:]
    parts = mesh.size
    order = None if isinstance(weight, CodedExperts) else weight.order
    if inputs and parts > 1 and order is not None:
        return None
    if inputs and (weight.codes.shape[-3] % parts or (groups > 1 and groups % parts)):
        return None
    if any(over and size % parts for over, size in zip(outputs, rows, strict=True)):
        return None
    if outputs[-1] and weight.codes.shape[-4] % parts:
        return None
    codes = placed(mesh, PartitionSpec(*first, *outputs, inputs))
    scale = placed(mesh, PartitionSpec(*first, inputs if groups > 1 else None, *outputs))
    if weight.offset is not None:
        return replace(weight, codes=codes, scale=scale, offset=scale)  # type: ignore[arg-type]
    if order is not None:
        return replace(weight, codes=codes, scale=scale, order=replicated(mesh))  # type: ignore[arg-type]
    return replace(weight, codes=codes, scale=scale)  # type: ignore[arg-type]
