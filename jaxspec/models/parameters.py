"""Parameters: each one declared once, with its shape, axes, initial value and place in a checkpoint.

Initialisation, loading, sharding and export all follow from the declaration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxspec_kernels.matmul import PackedWeight, matmul


class Source(Protocol):
    """How a parameter is stored in a checkpoint of Hugging Face names and [out, in] matrices.

    Attributes:
      kind: of its stored dtype, "float", "int" or "bool".
    """

    kind: ClassVar[str]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of every tensor that makes up the parameter."""
        ...

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter made of its tensors."""
        ...

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        """The tensors of a parameter: the inverse of `join`."""
        ...


@runtime_checkable
class PartialSource(Source, Protocol):
    """A source that holds part of one tensor, of which other parameters hold the rest."""

    def put(self, whole: np.ndarray, value: np.ndarray) -> None:
        """Writes the parameter into the tensor."""
        ...


@dataclass(frozen=True)
class Whole:
    """A tensor kept as it is stored."""

    kind: ClassVar[str] = "float"
    name: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, self.shape),)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return tensors[0]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [value]


@dataclass(frozen=True)
class Projection:
    """A matrix stored [out, in], used as in_shape + out_shape.

    The input-major order is the faster one on the CPU: with five rows a 30-layer pass of SmolLM2-135M
    took 24 ms input-major against 35 ms as stored (two cores, float32).
    """

    kind: ClassVar[str] = "float"
    name: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (math.prod(self.out_shape), self.in_width)),)

    @property
    def in_width(self) -> int:
        return math.prod(self.in_shape)

    def per_block(self, size: int) -> "Projection":
        """Where one number for every `size` inputs would be stored."""
        return replace(self, in_shape=(self.in_width // size,))

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        return tensors[0].T.reshape(*self.in_shape, *self.out_shape)

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        (_, shape) = self.tensors[0]
        return [np.ascontiguousarray(value.reshape(shape[::-1]).T)]


@dataclass(frozen=True)
class FusedQKV:
    """Query, key and value projections as one [in, N, G+2, D], grouped by key/value head.

    With `in_width` None it is the fused bias, [N, G+2, D].
    """

    kind: ClassVar[str] = "float"
    names: tuple[str, str, str]
    in_width: int | None
    num_kv_heads: int
    group: int
    head_dim: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        tail = () if self.in_width is None else (self.in_width,)
        query = self.num_kv_heads * self.group * self.head_dim
        key = self.num_kv_heads * self.head_dim
        return tuple((name, (size, *tail)) for name, size in zip(self.names, (query, key, key), strict=True))

    def per_block(self, size: int) -> "FusedQKV":
        """Where one number for every `size` inputs would be stored."""
        return replace(self, in_width=(self.in_width or 0) // size)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        parts = [t.reshape(self.num_kv_heads, -1, self.head_dim, *t.shape[1:]) for t in tensors]
        fused = np.concatenate(parts, axis=1)
        return fused if self.in_width is None else np.moveaxis(fused, -1, 0)

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        fused = value if self.in_width is None else np.moveaxis(value, 0, -1)
        parts = (fused[:, : self.group], fused[:, self.group : -1], fused[:, -1:])
        return [
            np.ascontiguousarray(part.reshape(shape))
            for part, (_, shape) in zip(parts, self.tensors, strict=True)
        ]


@dataclass(frozen=True)
class FusedGateUp:
    """Gate and up projections as one [in, 2, F]; with `in_width` None their fused bias, [2, F]."""

    kind: ClassVar[str] = "float"
    names: tuple[str, str]
    in_width: int | None
    width: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        tail = () if self.in_width is None else (self.in_width,)
        return tuple((name, (self.width, *tail)) for name in self.names)

    def per_block(self, size: int) -> "FusedGateUp":
        """Where one number for every `size` inputs would be stored."""
        return replace(self, in_width=(self.in_width or 0) // size)

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        fused = np.stack(tensors)
        return fused if self.in_width is None else np.moveaxis(fused, -1, 0)

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        fused = value if self.in_width is None else np.moveaxis(value, 0, -1)
        return [np.ascontiguousarray(part) for part in fused]


class Buffer(nnx.Variable):
    """An array that comes with the weights but is not trained: an index table."""


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
      rngs: random streams for the initial value; not used while shapes are evaluated.
      shape: of the array on the device.
      axes: logical axis of every dimension, keys of `config.AXIS_TO_MESH`.
      source: where a checkpoint keeps it.
      dtype: on the device.
      init: "normal" with variance 1 / fan_in, "ones" or "zeros".
      fan_in: inputs that one output sums over.
    """
    assert len(axes) == len(shape), (axes, shape)
    if init == "normal":
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    else:
        value = {"ones": jnp.ones, "zeros": jnp.zeros}[init](shape, jnp.float32)
    return nnx.Param(value.astype(dtype), axes=axes, source=source)


def bias_parameter(
    present: bool,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    source: Source,
    *,
    dtype: jnp.dtype,
) -> nnx.Param | None:
    """Declares a bias, zero until a checkpoint fills it; None for a layer without one."""
    return parameter(rngs, shape, axes, source, dtype=dtype, init="zeros") if present else None


def product(
    x: jax.Array,
    kernel: jax.Array | PackedWeight,
    *,
    contracting: int = 1,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Multiplies the last axes of x with the first axes of a weight.

    Args:
      x: [..., in axes].
      kernel: [in axes, out axes].
      contracting: number of in axes. They are flattened here: left to itself, XLA sums over them in
        another order and transposes the weight in every step.
      out_dtype: of the result; the dtype of x by default. Sums are float32 on every backend.

    Returns:
      [..., out axes].
    """
    batch, ins, outs = x.shape[:-contracting], kernel.shape[:contracting], kernel.shape[contracting:]
    width = math.prod(ins)
    return matmul(x.reshape(*batch, width), kernel.reshape(width, *outs), out_dtype=out_dtype)
