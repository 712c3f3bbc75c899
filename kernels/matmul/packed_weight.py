"""A float32 weight in the fewer bytes that its checkpoint stores it in."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

BLOCK = 32
"""Inputs that share a scale, but for Q6_K's, of which 16 do."""
ROW_BLOCK = 16
"""Inputs of a row that share a scale where rows are rounded to 8 bits."""
QUAD = 4
"""Inputs of an output that lie side by side: what one instruction multiplies in a lane of 32 bits."""
TILE = 32
"""Outputs that lie side by side; a tile's inputs follow one another, so that it is read as one stream."""
DOUBLED = 2 * np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Twice the values of MXFP4's codes: integers."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "offset"),
    meta_fields=("shape", "activations"),
)
@dataclass(frozen=True)
class PackedWeight:
    """A weight in fewer bits than float32, each of which stands for an exact float32 value.

    Outputs lie in tiles, of which the last is filled up.

    Attributes:
      values: one of
        u16[tiles, width, TILE], the weight as bfloat16, its bits: XLA on a CPU would gather bfloat16 out of
        a float32 copy of all of it, made in every step;
        i8[tiles, width / 4, TILE, 4], the weight being scale * q;
        u8[tiles, width / 8, TILE, 4], the same of q in 0 … 15: of row i, the lower four bits of byte j are
        input 8i + j and the upper ones input 8i + 4 + j. If the scale is uint8, they are the codes of
        MXFP4, and q is twice the value of a code.
      scale: [tiles, width / block, TILE], a block being 32 or 16 inputs; float16 where that holds it
        exactly, else float32; for MXFP4 uint8, an exponent s that stands for 2 ** (s - 127), and 0 for 0.
        None for bfloat16. scale * q is exact in float32.
      offset: as `scale`, or None: what is added to scale * q, rounded once.
      shape: of the weight: axes of `width` inputs, then axes of outputs.
      activations: "float32", or "int8" for products with rows rounded to 8 bits (`numba_int8.py`); of
        bfloat16 always "float32".
    """

    values: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, ...]
    activations: str = "float32"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def form(self) -> str:
        """What the values are: "bfloat16", "int8", "uint8" or "mxfp4"."""
        if self.scale is not None and self.scale.dtype == np.uint8:
            return "mxfp4"
        return "bfloat16" if self.values.dtype == np.uint16 else str(self.values.dtype)

    @property
    def width(self) -> int:
        """Inputs."""
        held = {"bfloat16": 1, "int8": QUAD, "uint8": 2 * QUAD, "mxfp4": 2 * QUAD}
        return self.values.shape[1] * held[self.form]

    @property
    def block(self) -> int:
        """Inputs that share a scale; without scales BLOCK."""
        return BLOCK if self.scale is None else self.width // self.scale.shape[1]

    @property
    def outputs(self) -> int:
        return self.size // self.width

    def __getitem__(self, index: object) -> "PackedWeight":
        assert index is Ellipsis, "a packed weight is read whole, as a parameter is"
        return self

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dense(), dtype)

    def reshape(self, *shape: int) -> "PackedWeight":
        """With other axes; the boundary between inputs and outputs stays where it is."""
        rest = -math.prod(shape)
        return replace(self, shape=tuple(self.size // rest if size < 0 else size for size in shape))

    def stored(self, outputs: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Values [..., width] of some outputs i32[...]; f32 scales and offsets [..., width / block].

        Ids outside the weight are clamped into it.
        """
        tile, lane = jnp.divmod(jnp.clip(outputs, 0, self.outputs - 1), TILE)
        values, scale, offset = (
            None if array is None else array[tile, :, lane]
            for array in (self.values, self.scale, self.offset)
        )
        assert values is not None
        if self.form == "bfloat16":
            return lax.bitcast_convert_type(values, jnp.bfloat16), None, None
        if self.form in ("uint8", "mxfp4"):
            values = jnp.stack([values & 15, values >> 4], axis=-2)
        values = values.reshape(*lane.shape, self.width)
        if self.form == "mxfp4":
            assert scale is not None
            factor = lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
            return jnp.asarray(DOUBLED, jnp.int8)[values], factor, None
        scale, offset = (None if a is None else a.astype(jnp.float32) for a in (scale, offset))
        return values, scale, offset

    def columns(self, outputs: jax.Array | np.ndarray) -> jax.Array:
        """f32[..., width] of some outputs i32[...]; ids outside the weight are clamped into it."""
        values, scale, offset = self.stored(outputs)
        columns = values.astype(jnp.float32)
        if scale is not None:
            columns = columns.reshape(*scale.shape, self.block) * scale[..., None]
        if offset is not None:
            columns = columns + offset[..., None]
        return columns.reshape(values.shape)

    def dense(self) -> jax.Array:
        """The weight as float32, of `shape`."""
        return self.columns(np.arange(self.outputs)).T.reshape(self.shape)


def pack(
    values: np.ndarray,
    scale: np.ndarray | None,
    offset: np.ndarray | None,
    shape: tuple[int, ...],
    *,
    activations: str = "float32",
) -> PackedWeight:
    """A packed weight, on the host.

    Args:
      values: bf16[width, outputs], or q: i8, or u8 in 0 … 15; with a scale of uint8 the codes of MXFP4.
      scale, offset: f32[width / block, outputs], or None; see `PackedWeight` for a scale of uint8.
      shape: of the weight.
      activations: see `PackedWeight`.
    """
    if values.dtype == ml_dtypes.bfloat16:
        return PackedWeight(_tiled(values.view(np.uint16)), None, None, shape)
    if values.dtype == np.uint8:
        halves = values.reshape(-1, 2, QUAD, values.shape[1])
        values = (halves[:, 0] | halves[:, 1] << 4).reshape(-1, values.shape[1])
    tiles = _tiled(values)
    quads = tiles.reshape(tiles.shape[0], -1, QUAD, TILE).swapaxes(2, 3)
    stored: Any = np.ascontiguousarray(quads)
    return PackedWeight(stored, _tiled(_short(scale)), _tiled(_short(offset)), shape, activations)


def _short(array: np.ndarray | None) -> np.ndarray | None:
    """As float16 where that is exact."""
    if array is None or array.dtype == np.uint8:
        return array
    with np.errstate(over="ignore"):
        short = array.astype(np.float16)
    return short if np.array_equal(short.astype(np.float32), array) else array


def _tiled(array: np.ndarray | None) -> Any:
    """[tiles, inputs, TILE] of [inputs, outputs]."""
    if array is None:
        return None
    tiles = -(-array.shape[1] // TILE)
    full = np.zeros((array.shape[0], tiles * TILE), array.dtype)
    full[:, : array.shape[1]] = array
    return np.ascontiguousarray(full.reshape(-1, tiles, TILE).swapaxes(0, 1))
