"""Tensors that are made from those of a checkpoint, or of a network that is loaded."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.matmul import PackedWeight
from jaxspec_kernels.packed_matmul import CodedWeight

from jaxspec.files import TensorSource
from jaxspec.files.quantized.blocks import Blocks
from jaxspec.weights.memory import ArrayTensor


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that is computed from another tensor of the checkpoint."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self) -> np.ndarray:
        return self.array


@dataclass(frozen=True, eq=False)
class RatedTensor:
    """A tensor of a checkpoint, and how much each of its inputs counts when it is rounded.

    Attributes:
      tensor: the tensor.
      importance: see `round_to_blocks`.
    """

    tensor: TensorSource
    importance: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def read(self) -> np.ndarray:
        return self.tensor.read()


@dataclass(frozen=True, eq=False)
class OutputRows:
    """`lm_head.weight` for a head without one: the target's output rows for the tokens that it drafts.

    Attributes:
      ids: target ids of these tokens, [W].
      width: M of the target.
      importance: see `round_to_blocks`.
      kernel: the target's output projection [M, V]; None until it is loaded.
    """

    ids: np.ndarray
    width: int
    importance: np.ndarray | None = None
    kernel: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.ids.size, self.width)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def read(self) -> np.ndarray:
        if isinstance(self.kernel, PackedWeight | CodedWeight):
            return np.asarray(self.kernel).T[self.ids]
        # Select the rows on the device: all of a large model's would be gigabytes on the host.
        return np.asarray(jnp.take(self.kernel, self.ids, axis=1)).T

    def read_blocks(self) -> Blocks | None:
        if not isinstance(self.kernel, PackedWeight):
            return None
        stored = self.kernel.stored(self.ids)
        return Blocks(*(None if array is None else np.asarray(array) for array in stored))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class TargetRows(ArrayTensor):
    """`OutputRows` of a target whose weights are about to change.

    Attributes:
      array: i32[W], the ids.
      target: the target. Its output projection is read by `value`.
    """

    target: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.array.size, self.target.config.hidden_size)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def value(self) -> jax.Array:
        return jnp.take(self.target.output_kernel, self.array, axis=1).T
