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
    data_fields=("words", "scale"),
    meta_fields=("has_zero", "bits"),
)
@dataclass(frozen=True)
class CodedExperts(PackedArray):
    """Weights [E, M, out axes], each of which is a `CodedWeight` with one axis of inputs.

    Attributes:
      words, scale: with E as their first axis.
      has_zero, bits: see `CodedWeight`.
    """

    words: jax.Array
    scale: jax.Array
    has_zero: bool = False
    bits: int = 8

    @property
    def shape(self) -> tuple[int, ...]:
        count, *first, tiles, blocks, rows, words = self.words.shape
        return count, blocks * words * 16 // self.bits, *first, tiles * rows

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def expert(self, words: jax.Array, scale: jax.Array) -> CodedWeight:
        """An expert, from its part of the arrays."""
        return CodedWeight(words, scale, None, (), self.has_zero, self.bits)

    def dense(self) -> jax.Array:
        """The weights as float32, of `shape`."""
        return jax.vmap(lambda words, scale: self.expert(words, scale).dense())(self.words, self.scale)


def stack_codes(experts: Sequence[CodedWeight]) -> CodedExperts | None:
    """Experts from weights on the host; None if they have several forms, orders of inputs, or offsets."""
    first = experts[0]
    forms = {(e.words.shape, e.scale.shape, e.has_zero, e.bits) for e in experts}
    if len(forms) > 1 or any(each.order is not None or each.offset is not None for each in experts):
        return None
    words, scale = (np.stack([getattr(each, name) for each in experts]) for name in ("words", "scale"))
    return CodedExperts(words, scale, first.has_zero, first.bits)  # type: ignore[arg-type]
