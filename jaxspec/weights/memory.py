"""Tensors that are arrays in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxspec.files.errors import CheckpointError

Axes: TypeAlias = Sequence[int | Sequence[int]]
"""The axes of an array in a tensor's order; several in a sequence of their own become one axis."""

Names: TypeAlias = Callable[[str], str | tuple[str, Axes] | None]
"""Translates an array's name to that of a tensor, alone or with the order of its axes; None leaves it out."""


@dataclass(frozen=True, eq=False)
class ArrayTensor:
    """A tensor that is an array in memory, of NumPy or JAX.

    Attributes:
      array: the array.
      axes: its axes in the tensor's order; None keeps them as they are.
    """

    array: Any
    axes: tuple[tuple[int, ...], ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return ordered_shape(self.array.shape, self.axes)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    def value(self) -> Any:
        """The array whose axes, put in order, are the tensor's."""
        return self.array

    def read(self) -> np.ndarray:
        return in_order(np.asarray(self.value()), self.axes)


def ordered_shape(shape: Sequence[int], axes: tuple[tuple[int, ...], ...] | None) -> tuple[int, ...]:
    """The shape that `in_order` gives an array of this shape."""
    if axes is None:
        return tuple(shape)
    return tuple(int(np.prod([shape[axis] for axis in group], dtype=np.int64)) for group in axes)


def in_order(array: Any, axes: tuple[tuple[int, ...], ...] | None) -> Any:
    """An array of NumPy or JAX with its axes in another order, each group of axes as one."""
    if axes is None:
        return array
    flat = [axis for group in axes for axis in group]
    return array.transpose(flat).reshape(ordered_shape(array.shape, axes))


def array_tensors(arrays: Mapping[str, Any], names: Names | None, what: str) -> dict[str, ArrayTensor]:
    """Arrays by name as the tensors of a checkpoint.

    Args:
      arrays: by their names.
      names: translates names; None keeps them.
      what: names the arrays in messages.

    Raises:
      CheckpointError: a value is not an array, an order does not fit its array, or two have one name.
    """
    tensors: dict[str, ArrayTensor] = {}
    for own, array in arrays.items():
        if not isinstance(getattr(array, "shape", None), tuple) or not hasattr(array, "dtype"):
            raise CheckpointError(f"{what}: {own!r} is not an array but {type(array).__name__}")
        found = own if names is None else names(own)
        if found is None:
            continue
        name, axes = (found, None) if isinstance(found, str) else found
        groups = None
        if axes is not None:
            groups = tuple(
                (int(axis),) if isinstance(axis, int | np.integer) else tuple(axis) for axis in axes
            )
        in_groups = None if groups is None else sorted(axis for group in groups for axis in group)
        if in_groups not in (None, list(range(array.ndim))):
            raise CheckpointError(f"{what}: {own!r} has {array.ndim} axes, names gives the order {axes}")
        if name in tensors:
            raise CheckpointError(f"{what}: tensor {name!r} is given twice, the second time by {own!r}")
        tensors[name] = ArrayTensor(array, groups)
    return tensors
