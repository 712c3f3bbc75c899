"""A weight of a float32 network in its checkpoint's smaller format."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxspec_kernels.packed_array import PackedArray

BLOCK = 32
"""Inputs that share a scale of the weight; in Q6_K it is 16."""
QUAD = 4
"""Adjacent inputs of one output: as many as one instruction multiplies in a lane of 32 bits."""
TILE = 32
"""Outputs of a tile, which are adjacent for each input, so that a tile is read as one stream."""
ZERO = 32
"""What is added to integers of 6 bits so that they are not negative."""
DOUBLED = 2 * np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Twice the values of MXFP4's codes, which makes them integers."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "offset", "scale_unit", "offset_unit"),
    meta_fields=("shape", "activations", "row_block"),
)
@dataclass(frozen=True)
class PackedWeight(PackedArray):
    """A weight with fewer bits than float32, whose values are defined exactly in float32.

    Outputs are stored in tiles; the last tile is padded.

    Attributes:
      values: one of
        u16[tiles, width, TILE]: the bits of the weight as bfloat16. (From a bfloat16 array, XLA on a CPU
        would gather through a float32 copy of all of it in every step.)
        i8[tiles, width / 4, TILE, 4]: q, where the weight is scale * q;
        u32[tiles, 3 width / 16, TILE]: q from -32 to 31. Three words hold q + 32 of 16 inputs. Byte j of the
        first word has the lower four bits of inputs j and 4 + j, byte j of the second those of inputs 8 + j
        and 12 + j, and byte j of the third the upper two bits of all four; the first input is always in the
        lowest bits;
        u8[tiles, width / 8, TILE, 4]: q in 0 to 15, two per byte. In row i, the lower four bits of byte j are
        input 8i + j and the upper ones input 8i + 4 + j. If the scale is uint8, they are codes of MXFP4, and
        q is twice the value of a code.
      scale: [tiles, width / block, TILE] for blocks of 32 or 16 inputs; float16 if that is exact, else
        float32. For MXFP4 uint8: s stands for 2 ** (s - 127), except that 0 stands for 0. With `scale_unit`
        int8. None for bfloat16. scale * q is exact in float32.
      offset: like `scale`: added to scale * q, with one rounding. None if there is none.
      shape: the shape of the weight: axes of `width` inputs, then axes of outputs.
      activations: "float32", or "int8" for products with activations rounded to 8 bits (`numba_int8.py`);
        always "float32" for bfloat16.
      row_block: inputs that share a scale of activations rounded to 8 bits: 32, or 16, which is more precise;
        at most `block`.
      scale_unit: [tiles, width / 256, TILE], what 1 of an int8 scale stands for, like a scale float16 or
        float32; None without such scales. (In tests the blocks of 256 inputs have other sizes.) The product
        is exact in float32.
      offset_unit: the same for `offset`.
    """

    values: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, ...]
    activations: str = "float32"
    row_block: int = BLOCK
    scale_unit: jax.Array | None = None
    offset_unit: jax.Array | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def form(self) -> str:
        """The kind of `values`: "bfloat16", "int8", "int6", "uint8" or "mxfp4"."""
        if self.scale is not None and self.scale.dtype == np.uint8:
            return "mxfp4"
        dtype = str(self.values.dtype)
        return {"uint16": "bfloat16", "uint32": "int6"}.get(dtype, dtype)

    @property
    def width(self) -> int:
        """The number of inputs."""
        held = {"bfloat16": 1, "int8": QUAD, "int6": 4 * QUAD, "uint8": 2 * QUAD, "mxfp4": 2 * QUAD}
        return self.values.shape[1] * held[self.form] // (3 if self.form == "int6" else 1)

    @property
    def block(self) -> int:
        """Inputs that share a scale; BLOCK if there are no scales."""
        return BLOCK if self.scale is None else self.width // self.scale.shape[1]

    @property
    def per_unit(self) -> int:
        """Scales that share a unit; 0 if there are no units."""
        if self.scale is None or self.scale_unit is None:
            return 0
        return self.scale.shape[1] // self.scale_unit.shape[1]

    @property
    def factors(self) -> tuple[jax.Array | None, ...]:
        """Scales, offsets, and the units of both; each may be None."""
        return self.scale, self.offset, self.scale_unit, self.offset_unit

    @property
    def outputs(self) -> int:
        """The number of outputs, without padding."""
        return self.size // self.width

    def reshape(self, *shape: int) -> "PackedWeight":
        """The weight with other axes. The boundary between input and output axes must stay the same."""
        rest = -math.prod(shape)
        return replace(self, shape=tuple(self.size // rest if size < 0 else size for size in shape))

    def stored(self, outputs: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """The stored values [..., width] of some outputs i32[...], and f32 scales and offsets.

        Scales and offsets are [..., width / block], or None. Ids outside the weight are clamped.
        """
        tile, lane = jnp.divmod(jnp.clip(outputs, 0, self.outputs - 1), TILE)
        values, scale, offset, scale_unit, offset_unit = (
            None if array is None else array[tile, :, lane] for array in (self.values, *self.factors)
        )
        assert values is not None
        if self.form == "bfloat16":
            return lax.bitcast_convert_type(values, jnp.bfloat16), None, None
        if self.form == "int6":
            values = _integers_of_6_bits(values)
        if self.form in ("uint8", "mxfp4"):
            values = jnp.stack([values & 15, values >> 4], axis=-2)
        values = values.reshape(*lane.shape, self.width)
        if self.form == "mxfp4":
            assert scale is not None
            factor = lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
            return jnp.asarray(DOUBLED, jnp.int8)[values], factor, None
        return values, self._floats(scale, scale_unit), self._floats(offset, offset_unit)

    def _floats(self, factors: jax.Array | None, unit: jax.Array | None) -> jax.Array | None:
        """Scales or offsets [..., width / block] as float32."""
        if factors is None or unit is None:
            return None if factors is None else factors.astype(jnp.float32)
        wide = factors.astype(jnp.float32).reshape(*unit.shape, self.per_unit)
        return (wide * unit.astype(jnp.float32)[..., None]).reshape(factors.shape)

    def columns(self, outputs: jax.Array | np.ndarray) -> jax.Array:
        """The weights f32[..., width] of some outputs i32[...]; ids outside the weight are clamped."""
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


@partial(jax.tree_util.register_dataclass, data_fields=("columns",), meta_fields=())
@dataclass(frozen=True)
class PackedRows(PackedArray):
    """A packed table [rows, M] that is read in single rows, such as an embedding.

    Attributes:
      columns: the weight [M, rows].
    """

    columns: PackedWeight

    @property
    def dtype(self) -> np.dtype:
        return self.columns.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.columns.shape[::-1]

    def dense(self) -> jax.Array:
        """The table as float32."""
        return self.columns.dense().T

    def rows(self, index: jax.Array) -> jax.Array:
        """The rows f32[..., M] at i32[...]; indices outside the table are clamped."""
        return self.columns.columns(index)


def pack(
    values: np.ndarray,
    scale: np.ndarray | None,
    offset: np.ndarray | None,
    shape: tuple[int, ...],
    *,
    scale_unit: np.ndarray | None = None,
    offset_unit: np.ndarray | None = None,
    activations: str = "float32",
    row_block: int = BLOCK,
    fits_6_bits: bool = True,
) -> PackedWeight:
    """A packed weight, on the host.

    Args:
      values: [outputs, width]: the weights in bfloat16, or q in int8, or q from 0 to 15 in uint8, or codes of
        MXFP4 in uint8.
      scale, offset: f32[outputs, width / block], or None; for MXFP4 the scale is u8, as in `PackedWeight`;
        with units they are i8.
      shape: the shape of the weight.
      scale_unit, offset_unit: f32[outputs, width / 256], or None; see `PackedWeight`.
      activations, row_block: see `PackedWeight`. `row_block` is reduced to the weight's own blocks.
      fits_6_bits: whether int8 values from -32 to 31 are stored in 6 bits.
    """
    if values.dtype == ml_dtypes.bfloat16:
        return PackedWeight(tiled(values.view(np.uint16)), None, None, shape)
    assert scale is not None
    row_block = min(row_block, values.shape[1] // scale.shape[1])
    if fits_6_bits and values.dtype == np.int8 and values.min() >= -ZERO and values.max() < ZERO:
        stored: Any = tiled(_words_of_6_bits(values))
    else:
        # Four values at a time, as one word, because that is faster.
        words: Any = np.ascontiguousarray(values).view(np.uint32)
        if values.dtype == np.uint8:
            words = words[:, 0::2] | words[:, 1::2] << 4
        words = tiled(words)
        stored = words.view(values.dtype).reshape(*words.shape, QUAD)
    scale, offset, scale_unit, offset_unit = (
        None if factors is None else tiled(_short(factors))
        for factors in (scale, offset, scale_unit, offset_unit)
    )
    return PackedWeight(stored, scale, offset, shape, activations, row_block, scale_unit, offset_unit)


def _words_of_6_bits(values: np.ndarray) -> Any:
    """u32[outputs, 3 width / 16] from integers [outputs, width]; see `PackedWeight`."""
    quads = np.ascontiguousarray(values + np.int8(ZERO)).view(np.uint32).reshape(len(values), -1, 4)
    low, high = quads & 0x0F0F0F0F, quads >> 4 & 0x03030303
    words = np.empty((*quads.shape[:2], 3), np.uint32)
    words[..., :2] = low[..., 0::2] | low[..., 1::2] << 4
    words[..., 2] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    return words.reshape(len(values), -1)


def _integers_of_6_bits(words: jax.Array) -> jax.Array:
    """i8[..., width] from words u32[..., 3 width / 16]."""
    words = words.reshape(*words.shape[:-1], -1, 3)
    quad = jnp.arange(4, dtype=jnp.uint32)
    low = words[..., quad // 2] >> 4 * (quad % 2) & 0x0F0F0F0F
    high = words[..., 2:] >> 2 * quad & 0x03030303
    integers = lax.bitcast_convert_type(low | high << 4, jnp.int8) - jnp.int8(ZERO)
    return integers.reshape(*words.shape[:-2], -1)


def _short(array: np.ndarray) -> np.ndarray:
    """Floats as float16 if that is exact; otherwise the array unchanged."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        short = array.astype(np.float16)
    return short if np.array_equal(short.astype(np.float32), array) else array


def tiled(rows: np.ndarray) -> Any:
    """Rearranges [outputs, n] to [tiles, n, TILE], padded with zeros."""
    outputs, length = rows.shape
    tiles = np.zeros((-(-outputs // TILE), length, TILE), rows.dtype)
    whole = outputs // TILE
    tiles[:whole] = rows[: whole * TILE].reshape(whole, TILE, length).swapaxes(1, 2)
    if whole < len(tiles):
        tiles[whole, :, : outputs - whole * TILE] = rows[whole * TILE :].T
    return tiles
