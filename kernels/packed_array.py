"""What weights in packed formats have in common."""

import math
from typing import Any, Protocol, TypeVar

import jax
import numpy as np


class _Packed(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    def dense(self) -> jax.Array: ...


_Self = TypeVar("_Self")


class PackedArray:
    """Stands for an array: it is read whole, or dequantized. A subclass has `shape`, `dtype` and `dense`."""

    @property
    def ndim(self: _Packed) -> int:
        return len(self.shape)

    @property
    def size(self: _Packed) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def __getitem__(self: _Self, index: object) -> _Self:
        assert index is Ellipsis, "a packed weight can only be read as a whole, with [...]"
        return self

    def __array__(self: _Packed, dtype: np.dtype | None = None, copy: bool | None = None) -> Any:
        return np.asarray(jax.jit(type(self).dense)(self), dtype)  # a program is sooner compiled than a dozen
