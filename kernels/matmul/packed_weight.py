"""A float32 weight in the fewer bytes that its checkpoint stores it in."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 32
"""Inputs that share a scale."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "offset"),
    meta_fields=("shape",),
)
@dataclass(frozen=True)
class PackedWeight:
    """A weight whose every value is exactly a float32 that fewer bits tell.

    Attributes:
      values: one of
        bf16[width, outputs], the weight itself;
        i8[width, outputs], the weight being scale * q;
        u8[width / 2, outputs], the weight being scale * q + offset rounded once; input 2i is the lower
        four bits of row i, input 2i + 1 the upper.
      scale: f32[width / BLOCK, outputs], or None; scale * q is exact in float32.
      offset: f32[width / BLOCK, outputs], or None.
      shape: of the weight: axes of `width` inputs, then axes of `outputs`.
    """

    values: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def form(self) -> str:
        """What the values are: "bfloat16", "int8" or "uint8"."""
        return str(self.values.dtype)

    def __getitem__(self, index: object) -> "PackedWeight":
        assert index is Ellipsis, "a packed weight is read whole, as a parameter is"
        return self

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dense(), dtype)

    def reshape(self, *shape: int) -> "PackedWeight":
        """With other axes; the boundary between inputs and outputs stays where it is."""
        rest = -math.prod(shape)
        return replace(self, shape=tuple(self.size // rest if size < 0 else size for size in shape))

    def take(self, outputs: jax.Array | np.ndarray) -> "PackedWeight":
        """[width, ...] of some outputs i32[...]; ids outside the weight are clamped into it."""
        taken = jax.tree.map(lambda array: jnp.take(array, outputs, axis=1, mode="clip"), self)
        return replace(taken, shape=(self.width, *outputs.shape))

    @property
    def width(self) -> int:
        """Inputs."""
        return self.values.shape[0] * (2 if self.form == "uint8" else 1)

    def unpaired(self) -> jax.Array:
        """The values, one for each weight, [width, outputs]."""
        if self.form != "uint8":
            return self.values
        pairs = jnp.stack([self.values & 15, self.values >> 4], axis=1)
        return pairs.reshape(-1, *self.values.shape[1:])

    def dense(self) -> jax.Array:
        """The weight as float32, of `shape`."""
        weight = self.unpaired().astype(jnp.float32)
        if self.scale is not None:
            weight = weight.reshape(-1, BLOCK, *weight.shape[1:]) * self.scale[:, None]
        if self.offset is not None:
            weight = weight + self.offset[:, None]
        return weight.reshape(self.shape)


def pack(
    values: np.ndarray, scale: np.ndarray | None, offset: np.ndarray | None, shape: tuple[int, ...]
) -> PackedWeight:
    """A packed weight, on the host.

    Args:
      values: bf16[width, outputs], or q: i8, or u8 in 0 … 15 where there is an offset.
      scale, offset, shape: see `PackedWeight`.
    """
    if offset is not None:
        values = values[0::2] | values[1::2] << 4
    arrays = (None if array is None else np.ascontiguousarray(array) for array in (values, scale, offset))
    return PackedWeight(*arrays, shape)  # type: ignore[arg-type]
