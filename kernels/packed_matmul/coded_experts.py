"""Experts of a bfloat16 network in codes of eight or four bits, with scales."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.packed_array import PackedArray
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "offset"),
    meta_fields=("has_zero", "bits", "is_int8"),
)
@dataclass(frozen=True)
class CodedExperts(PackedArray):
    """Weights [E, M, out axes], each of which is a `CodedWeight` with one axis of inputs.

    Attributes:
      codes, scale, offset: with E as their first axis.
      has_zero, bits, is_int8: see `CodedWeight`.
    """

    codes: jax.Array
    scale: jax.Array
    has_zero: bool = False
    bits: int = 8
    offset: jax.Array | None = None
    is_int8: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        count, *first, tiles, blocks, rows, size = self.codes.shape
        return count, blocks * size * 8 // self.bits, *first, tiles * rows

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def expert(self, codes: jax.Array, scale: jax.Array, offset: jax.Array | None) -> CodedWeight:
        """An expert, from its part of the arrays."""
        return CodedWeight(
            codes, scale, None, (), self.has_zero, self.bits, offset=offset, is_int8=self.is_int8
        )

    def dense(self) -> jax.Array:
        """The weights as float32, of `shape`."""
        return jax.vmap(lambda *arrays: self.expert(*arrays).dense())(self.codes, self.scale, self.offset)


def stack_codes(experts: Sequence[CodedWeight]) -> CodedExperts | None:
    """Experts from weights on the host; None if they have several forms or orders of inputs."""
    first = experts[0]
    forms = {(e.codes.shape, e.scale.shape, e.has_zero, e.bits, e.is_int8, e.offset is None) for e in experts}
    if len(forms) > 1 or any(each.order is not None for each in experts):
        return None
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *experts)
    return CodedExperts(
        stacked.codes, stacked.scale, first.has_zero, first.bits, stacked.offset, first.is_int8
    )
