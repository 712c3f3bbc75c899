"""Parameters, each declared once with its shape, axes, initial value and source in a checkpoint.

Initialisation, loading, sharding and export all follow from the declaration.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxspec_kernels.matmul import PackedWeight, matmul
from jaxspec_kernels.packed_matmul import CodedWeight
from jaxspec_kernels.packed_matmul.coded_product import coded_product

Index = tuple[slice, ...]
"""A part of an array: a slice for each axis; () is the whole array."""


def array_functions(arrays: Sequence[Any]) -> Any:
    """`numpy` for arrays of NumPy, `jax.numpy` for arrays of JAX."""
    return np if isinstance(arrays[0], np.ndarray) else jnp


class Source(Protocol):
    """How a parameter is stored in a checkpoint with Hugging Face names and [out, in] matrices.

    Attributes:
      kind: the kind of the stored dtype, "float", "int" or "bool".
    """

    kind: ClassVar[str]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of every tensor that makes up the parameter."""
        ...

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        """The parameter, or the part `index` of it, from its tensors.

        Tensors may be views of files; little more than the part is read or copied. They may be arrays of
        JAX, too: then this is traced, and the parameter is one of JAX (`array_functions`).
        """
        ...

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        """The tensors of a parameter: the inverse of `join`."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter with the layout of its stored tensor."""

    kind: ClassVar[str] = "float"
    name: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, self.shape),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        return tensors[0][index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [value]


@dataclass(frozen=True)
class Rows(Whole):
    """A table [rows, M], such as an embedding: a step reads only a few of its rows."""

    @property
    def as_projection(self) -> "Projection":
        """The same tensor as a parameter [M, rows]."""
        rows, width = self.shape
        return Projection(self.name, (width,), (rows,))


@dataclass(frozen=True)
class Integers(Whole):
    """An index table, i32 on the device and i64 in a checkpoint."""

    kind: ClassVar[str] = "int"

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        return tensors[0].astype(np.int32)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [value.astype(np.int64)]


@dataclass(frozen=True)
class Projection:
    """A matrix stored [out, in], used as in_shape + out_shape; with an empty in_shape a bias, stored [out].

    With `copies`, every element of the first out axis is stored once and used so many times in a row. With
    `is_sensitive`, activations rounded to 8 bits before the product share their scales in smaller blocks.

    The input-major order is the faster one on the CPU: with five rows a 30-layer pass of SmolLM2-135M
    took 24 ms input-major against 35 ms as stored (two cores, float32).
    """

    kind: ClassVar[str] = "float"
    name: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    copies: int = 1
    is_sensitive: bool = False

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        width = (math.prod(self.in_shape),) if self.in_shape else ()
        return ((self.name, (math.prod(self.out_shape) // self.copies, *width)),)

    def per_output(self) -> "Projection":
        """The source of a parameter with one value for every output."""
        return replace(self, in_shape=(1,))

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        first, *rest = self.out_shape
        stored = tensors[0].T.reshape(*self.in_shape, first // self.copies, *rest)
        if self.copies == 1:
            return stored[index]
        along = len(self.in_shape)
        index = (*index, *(slice(None) for _ in range(stored.ndim - len(index))))
        used = np.arange(first)[index[along]] // self.copies
        return stored[(*index[:along], slice(None), *index[along + 1 :])].take(used, axis=along)

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        (_, shape) = self.tensors[0]
        value = value[(*(slice(None) for _ in self.in_shape), slice(None, None, self.copies))]
        return [np.ascontiguousarray(value.reshape(shape[::-1]).T)]


@dataclass(frozen=True)
class Fused:
    """Projections of the same input, or their biases, concatenated along `axis`, which is negative."""

    kind: ClassVar[str] = "float"
    parts: tuple[Projection, ...]
    axis: int = -1

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def in_shape(self) -> tuple[int, ...]:
        return self.parts[0].in_shape

    @property
    def is_sensitive(self) -> bool:
        return any(part.is_sensitive for part in self.parts)

    def per_output(self) -> "Fused":
        """See `Projection.per_output`."""
        return replace(self, parts=tuple(part.per_output() for part in self.parts))

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        # The parts are cut along the other axes before they are concatenated, and along this one after it.
        whole = slice(None)
        before = tuple(whole if i - len(index) == self.axis else each for i, each in enumerate(index))
        after = tuple(each if i - len(index) == self.axis else whole for i, each in enumerate(index))
        parts = [part.join([tensor], before) for part, tensor in zip(self.parts, tensors, strict=True)]
        return array_functions(parts).concatenate(parts, axis=self.axis)[after]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([part.out_shape[self.axis] for part in self.parts])
        pieces = np.split(value, ends[:-1], axis=self.axis)
        return [part.split(piece)[0] for part, piece in zip(self.parts, pieces, strict=True)]


@dataclass(frozen=True)
class Joined(Fused):
    """`Fused` projections whose matrices, or biases, are stored one below the other in one tensor."""

    name: str = ""

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        shapes = [shape for _, shape in super().tensors]
        return ((self.name, (sum(rows for rows, *_ in shapes), *shapes[0][1:])),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        (whole,), counts = tensors, [shape[0] for _, shape in super().tensors]
        ends = np.cumsum(counts).tolist()
        rows = [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]
        return super().join(rows, index)

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(super().split(value))]


def row_order(source: Projection | Fused, counts: Sequence[int]) -> np.ndarray:
    """The row of each output of a parameter, in the rows of all its tensors one after another.

    Args:
      counts: the rows of every tensor.
    """
    ends = np.cumsum(counts)
    rows = [np.arange(end - count, end)[:, None] for end, count in zip(ends, counts, strict=True)]
    return np.asarray(source.per_output().join(rows)).reshape(-1)


@dataclass(frozen=True)
class HeadRows:
    """Rows `start` to `stop - 1` of every head in a matrix [heads * rows, in], as [heads, stop - start, in].

    Other parameters hold the other rows. A single parameter for all rows would have to be sliced, and so
    copied, in every step.
    """

    kind: ClassVar[str] = "float"
    name: str
    heads: int
    rows: int
    start: int
    stop: int
    in_width: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (self.heads * self.rows, self.in_width)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        return self._by_head(tensors[0])[:, self.start : self.stop][index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        """The matrix, with zeros in the rows of other parameters."""
        ((_, shape),) = self.tensors
        whole = np.zeros(shape, value.dtype)
        self.put(whole, value)
        return [whole]

    def put(self, whole: np.ndarray, value: np.ndarray) -> None:
        """Writes the parameter's rows into the matrix."""
        self._by_head(whole)[:, self.start : self.stop] = value

    def _by_head(self, whole: np.ndarray) -> np.ndarray:
        return whole.reshape(self.heads, self.rows, self.in_width)


@dataclass(frozen=True)
class Initial:
    """The initial value of a parameter; the fields are arguments of `parameter`."""

    init: str
    fan_in: int
    shape: tuple[int, ...]
    dtype: jnp.dtype

    def __call__(self, make_key: Callable[[], jax.Array | None]) -> jax.Array:
        """The value; zeros without a key (see `NoKeys`)."""
        if self.init == "normal" and (key := make_key()) is not None:
            value = jax.random.normal(key, self.shape, jnp.float32) * self.fan_in**-0.5
        else:
            full = {"normal": jnp.zeros, "zeros": jnp.zeros, "ones": jnp.ones}[self.init]
            value = full(self.shape, jnp.float32)
        return value.astype(self.dtype)


class NoKeys(nnx.Rngs):
    """Random streams for `nnx.eval_shape`, where drawing numbers would only be traced."""

    def params(self) -> None:
        return None


class Buffer(nnx.Variable):
    """An array that is loaded with the weights but not trained, such as an index table."""


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    source: Source,
    *,
    dtype: jnp.dtype,
    init: str = "normal",
    fan_in: int = 1,
) -> nnx.Param:
    """Declares a parameter.

    Args:
      rngs: random streams for the initial value.
      shape: the shape on the device.
      axes: the logical axis of every dimension, of `config.AXIS_TO_MESH`; None for one that is never split.
      source: where a checkpoint stores it.
      dtype: the dtype on the device.
      init: "normal" with variance 1 / fan_in, "ones" or "zeros".
      fan_in: inputs that one output sums over.
    """
    assert len(axes) == len(shape), (axes, shape)
    initial = Initial(init, fan_in, shape, dtype)
    return nnx.Param(initial(rngs.params), axes=axes, source=source, initial=initial)


def bias_parameter(
    present: bool,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    source: Source,
    *,
    dtype: jnp.dtype,
) -> nnx.Param | None:
    """Declares a bias, initially zero; returns None if it is not `present`. Arguments as of `parameter`."""
    return parameter(rngs, shape, axes, source, dtype=dtype, init="zeros") if present else None


def product(
    x: jax.Array,
    kernel: jax.Array | PackedWeight | CodedWeight,
    *,
    contracting: int = 1,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies the last axes of x with the first axes of a weight.

    Args:
      x: [..., in axes].
      kernel: [in axes, out axes].
      contracting: the number of in axes. They are flattened here, because otherwise XLA sums over them in
        another order and transposes the weight in every step.
      out_dtype: the dtype of the result; that of x by default. Sums are float32 on every backend.

    Returns:
      [..., out axes].
    """
    batch, ins, outs = x.shape[:-contracting], kernel.shape[:contracting], kernel.shape[contracting:]
    width = math.prod(ins)
    x, kernel = x.reshape(*batch, width), kernel.reshape(width, *outs)
    if isinstance(kernel, CodedWeight):
        return coded_product(x, kernel, out_dtype=out_dtype)
    return matmul(x, kernel, out_dtype=out_dtype)
