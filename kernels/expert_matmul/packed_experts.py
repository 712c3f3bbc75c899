"""Experts in the fewer bits that a checkpoint stores them in, for products on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.matmul.packed_weight import TILE, PackedWeight


@partial(jax.tree_util.register_dataclass, data_fields=("stack",), meta_fields=("shape",))
@dataclass(frozen=True)
class PackedExperts:
    """Weights [E, M, out axes] of experts, each of which stands for an exact float32 value.

    Attributes:
      stack: one weight [M, outputs of all experts], each expert's filled up to whole tiles.
      shape: of the weights.
    """

    stack: PackedWeight
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, index: object) -> "PackedExperts":
        assert index is Ellipsis, "a packed weight is read whole, as a parameter is"
        return self

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dense(), dtype)

    def dense(self) -> jax.Array:
        """The weights as float32, of `shape`."""
        count, width, *outputs = self.shape
        columns = self.stack.dense().reshape(width, count, -1)[..., : math.prod(outputs)]
        return jnp.moveaxis(columns, 1, 0).reshape(self.shape)


def stack_experts(experts: Sequence[PackedWeight]) -> PackedExperts:
    """Packed weights [M, out axes] of the same form, of one expert each, as one; on the host."""
    first = experts[0]
    width, *outputs = first.shape
    tiles = len(experts) * first.values.shape[0]

    def stacked(arrays: Sequence[Any]) -> Any:
        # Scales are float16 where that holds those of an expert.
        return None if arrays[0] is None else np.concatenate(arrays, dtype=np.result_type(*arrays))

    stack = replace(
        first,
        values=stacked([expert.values for expert in experts]),
        scale=stacked([expert.scale for expert in experts]),
        offset=stacked([expert.offset for expert in experts]),
        shape=(width, tiles * TILE),
    )
    return PackedExperts(stack, (len(experts), width, *outputs))
