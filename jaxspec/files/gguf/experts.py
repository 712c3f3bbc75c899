"""Experts of a GGUF in the layout of gpt-oss's checkpoints: gate and up projections in one tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.gguf.architecture import check_experts
from jaxspec.files.gguf.tensor import GGUFTensor, JoinedTensor
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor

_MXFP4 = gguf.GGMLQuantizationType.MXFP4


def fuse_experts(tensors: Mapping[str, GGUFTensor]) -> dict[str, TensorSource]:
    """Joins gate and up projections [E, F, M] to `gate_up_proj` [E, M, 2F], interleaved.

    Down projections [E, M, F] become [E, F, M]. MXFP4 stays packed. Other tensors are unchanged.

    Raises:
      CheckpointError: a stack does not have the shape of experts, or gate and up projections do not match.
    """
    fused: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        stem, found, leaf = name.partition(".experts.")
        projection, _, kind = leaf.partition("_proj.")
        target = f"{stem}.experts.{{}}_proj{'_bias' if kind == 'bias' else ''}"
        if not found:
            fused[name] = tensor
            continue
        check_experts(name, tensor)
        if projection == "down":
            fused[target.format("down")] = tensor if kind == "bias" else _transposed([tensor])
        else:
            other = name.replace("gate_proj" if projection == "gate" else "up_proj", "{}_proj")
            gate, up = (tensors.get(other.format(each)) for each in ("gate", "up"))
            if gate is None or up is None or gate.shape != up.shape:
                raise CheckpointError(
                    f"{tensor.header.path}: {name!r} of shape {list(tensor.shape)} has no matching projection"
                )
            if kind == "bias":
                shape = (gate.shape[0], 2 * gate.shape[1])
                fused[target.format("gate_up")] = JoinedTensor((gate, up), shape, _in_turns)
            else:
                fused[target.format("gate_up")] = _transposed([gate, up])
    return fused


def _in_turns(*stacks: np.ndarray) -> np.ndarray:
    """Interleaves the rows of n stacks [E, F, …]: [E, nF, …]."""
    first = stacks[0]
    return np.stack(stacks, axis=2).reshape(first.shape[0], -1, *first.shape[2:])


def _transposed(stacks: list[GGUFTensor]) -> TensorSource:
    """Matrices [E, in, n * out] from n stacks [E, out, in], with interleaved outputs."""
    count, out, width = stacks[0].shape
    if any(stack.info.quantization != _MXFP4 for stack in stacks):
        shape = (count, width, out * len(stacks))
        return _JoinedStacks(tuple(stacks), shape, lambda *each: _in_turns(*each).swapaxes(1, 2))
    blocks = tuple(_Mxfp4Blocks(stack) for stack in stacks)
    shape = (count, out * len(stacks), width // 32)
    return Mxfp4Tensor(
        JoinedTensor(blocks, (*shape, 16), lambda *each: _in_turns(*map(_pairs_of_neighbours, each))),
        JoinedTensor(blocks, shape, lambda *each: _in_turns(*(stack[..., 0] for stack in each))),
    )


@dataclass(frozen=True)
class _JoinedStacks(JoinedTensor):
    """The matrices of all experts of a layer; see `MatrixStack`."""

    sources: tuple[GGUFTensor, ...]

    def matrices(self) -> list[TensorSource]:
        by_expert = zip(*(stack.parts() for stack in self.sources), strict=True)
        return [matrix for expert in by_expert for matrix in expert]


@dataclass(frozen=True)
class _Mxfp4Blocks:
    """The bytes of a stack in MXFP4, u8[E, out, in / 32, 17]: each block is a scale and 32 values."""

    stack: GGUFTensor
    dtype: np.dtype = np.dtype(np.uint8)  # noqa: RUF009 - a dtype does not change

    @property
    def shape(self) -> tuple[int, ...]:
        count, out, width = self.stack.shape
        return count, out, width // 32, 17

    def read(self) -> np.ndarray:
        return self.stack.packed.reshape(self.shape)


def _pairs_of_neighbours(blocks: np.ndarray) -> np.ndarray:
    """u8[…, 16]: byte i holds values 2i and 2i + 1, where ggml's holds values i and i + 16."""
    packed = blocks[..., 1:]
    values = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return values[..., 0::2] | values[..., 1::2] << 4
