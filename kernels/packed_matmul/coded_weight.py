"""A weight of a bfloat16 network in codes of eight or four bits, with scales."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxspec_kernels.packed_array import PackedArray

BLOCK_WORDS = 64
"""Words that hold a block of adjacent inputs; half as many, or for int8 a quarter, for small groups of inputs
and for widths that whole blocks do not divide."""
TILE = 64
"""Outputs of a tile, which is read as one stream; fewer if it does not divide the last axis of outputs."""
ZERO = 8
"""The code of four bits that stands for 0, without zero points."""
_ZERO_BITS = 0x1F


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "order", "offset"),
    meta_fields=("inner", "has_zero", "bits", "activations", "is_int8"),
)
@dataclass(frozen=True)
class CodedWeight(PackedArray):
    """A weight whose values are (code - zero point) * scale + offset.

    Attributes:
      codes: u8[out axes but the last, tiles, blocks, tile, block]: the bytes of words of 16 bits, which hold
        two codes of FP8 (float8_e4m3fn) or int8, or four of four bits, the first in the lowest bits. A tile
        of outputs is read block after block of its inputs. Code i of word j of a block is its input
        i * words + j, so that the codes i are adjacent inputs, as a kernel reads x.
      scale: u32[groups, out axes], the bits of a float32: one for width / groups inputs. The last axis may be
        shorter than that of the weight: then as many outputs share a scale. With `has_zero`, the five lowest
        bits of a scale are not its own, but the zero point.
      order: i32[width], the input of every code, if groups are not adjacent inputs; otherwise None.
      inner: the axes of the inputs after the first one.
      has_zero: whether scales hold zero points. Otherwise codes of four bits are less 8.
      bits: of a code.
      activations: "float8_e4m3fn" rounds the rows of `coded_product` to FP8 where they are many and codes are
        FP8; None never rounds them.
      offset: f32[groups, out axes], where a group is one code of every word of a block; codes of four bits
        then have zero points of 0. None for no offsets.
      is_int8: whether codes of eight bits are int8 instead of FP8.
    """

    codes: jax.Array
    scale: jax.Array
    order: jax.Array | None = None
    inner: tuple[int, ...] = ()
    has_zero: bool = False
    bits: int = 8
    activations: str | None = None
    offset: jax.Array | None = None
    is_int8: bool = False

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        return 16 // self.bits

    @property
    def width(self) -> int:
        """The number of inputs."""
        return self.codes.shape[-3] * self.block_words * self.per_word

    @property
    def block_words(self) -> int:
        """Words of a block."""
        return self.codes.shape[-1] // 2

    @property
    def out_axes(self) -> tuple[int, ...]:
        *first, tiles, _, rows, _ = self.codes.shape
        return *first, tiles * rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.width // math.prod(self.inner), *self.inner, *self.out_axes

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    @property
    def is_fp8(self) -> bool:
        """Whether codes are float8_e4m3fn."""
        return self.bits == 8 and not self.is_int8

    @property
    def columns(self) -> int:
        """Inputs that share a scale."""
        return self.width // self.scale.shape[0]

    @property
    def scale_rows(self) -> int:
        """Outputs that share a scale."""
        return self.out_axes[-1] // self.scale.shape[-1]

    def reshape(self, width: int, *outputs: int) -> "CodedWeight":
        """The weight with a single axis of inputs."""
        assert (width, outputs) == (self.width, self.out_axes), "only the axes of inputs can be joined"
        return replace(self, inner=())

    def dense(self) -> jax.Array:
        """The weight as float32, of `shape`."""
        shifts = jnp.arange(0, 16, self.bits, dtype=jnp.uint16)
        pairs = jnp.swapaxes(self.codes, -3, -2).astype(jnp.uint16)
        words = (pairs[..., 0::2] | pairs[..., 1::2] << 8)[..., None, :]
        codes = (words >> shifts[:, None] & jnp.uint16((1 << self.bits) - 1)).astype(jnp.uint8)
        codes = jnp.moveaxis(codes.reshape(*self.out_axes, self.scale.shape[0], self.columns), -2, 0)
        scale = jnp.repeat(self.scale, self.scale_rows, axis=-1)
        if self.bits == 8:
            code = jnp.int8 if self.is_int8 else jnp.float8_e4m3fn
            values = lax.bitcast_convert_type(codes, code).astype(jnp.float32)
        else:
            zero = (scale & _ZERO_BITS)[..., None] if self.has_zero else ZERO
            values = codes.astype(jnp.float32) - jnp.asarray(zero, jnp.float32)
        own = scale & jnp.uint32(~_ZERO_BITS & 0xFFFFFFFF) if self.has_zero else scale
        weights = values * lax.bitcast_convert_type(own, jnp.float32)[..., None]
        if self.offset is not None:
            weights += self.offset[..., None]
        weights = jnp.moveaxis(weights, -1, 1).reshape(self.width, *self.out_axes)
        if self.order is not None:
            weights = weights[jnp.argsort(self.order)]
        return weights.reshape(self.shape)


def block_words(width: int, bits: int, columns: int, *, is_int8: bool = False) -> int | None:
    """The words of a block; None if the kernels do not read such a weight.

    Args:
      width: the number of inputs.
      bits: of a code.
      columns: inputs that share a scale.
      is_int8: see `CodedWeight`.
    """
    for words in (BLOCK_WORDS, BLOCK_WORDS // 2, *([BLOCK_WORDS // 4] if is_int8 else [])):
        inputs = words * 16 // bits
        # A group is the whole width, a block, or the codes 0 and 1, 2 and 3 of its words, or each of them.
        parts = (1, 2) if is_int8 else (1,) if bits == 8 else (1, 2, 4)
        groups = [inputs // count for count in parts]
        if width % inputs == 0 and columns in (width, *groups):
            return words
    return None


def tile_outputs(outputs: int, groups: int, *, is_fp8: bool) -> int:
    """The outputs of a tile.

    Codes of FP8 with a scale for all inputs lie row by row, as cuBLAS reads them: few rows are not multiplied
    more slowly, and many rows in FP8 are as fast as can be.

    Args:
      outputs: of the last axis.
      groups: scales of an output.
      is_fp8: whether codes are FP8.
    """
    return 1 if is_fp8 and groups == 1 else math.gcd(outputs, TILE)


def pack_codes(
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    shape: tuple[int, ...],
    inner: tuple[int, ...] = (),
    order: np.ndarray | None = None,
    offset: np.ndarray | None = None,
) -> CodedWeight | None:
    """A packed weight, on the host; None if the kernels do not read such a weight.

    Args:
      codes: float8_e4m3fn, i8 or u8[outputs, width]; u8 are codes of four bits.
      scale: f32[outputs / rows, width / columns].
      zero: u8[outputs, width / columns], at most 16; None if it is 8 everywhere, or for eight bits.
      shape: the axes of the outputs. `rows` divides the last one, or is 1.
      inner, order: see `CodedWeight`.
      offset: f32[outputs, width / columns], for four bits with zero points of 0; or None.
    """
    outputs, width = codes.shape
    bits = 4 if codes.dtype == np.uint8 else 8
    groups = scale.shape[1]
    columns = width // groups
    is_int8 = codes.dtype == np.int8
    words = block_words(width, bits, columns, is_int8=is_int8) if width % groups == 0 else None
    if words is None or (offset is not None and words != columns):
        return None
    bits_of_scale = np.ascontiguousarray(scale.T, np.float32).view(np.uint32)
    if zero is not None:
        if (bits_of_scale & _ZERO_BITS).any():
            return None
        bits_of_scale = bits_of_scale | zero.T
    per_word = 16 // bits
    blocks = np.ascontiguousarray(codes).view(np.uint8).reshape(outputs, -1, per_word, words)
    stored = np.zeros((outputs, blocks.shape[1], words), np.uint16)
    for i in range(per_word):
        stored |= blocks[:, :, i].astype(np.uint16) << np.uint16(bits * i)
    *first, last = shape
    rows = outputs // scale.shape[0]
    tile = tile_outputs(last, groups, is_fp8=bits == 8 and not is_int8)
    tiles = stored.reshape(*first, last // tile, tile, -1, words).swapaxes(-3, -2)
    return CodedWeight(
        np.ascontiguousarray(tiles).view(np.uint8),  # type: ignore[arg-type]
        bits_of_scale.reshape(groups, *first, last // rows),  # type: ignore[arg-type]
        order,  # type: ignore[arg-type]
        inner,
        zero is not None,
        bits,
        offset=None if offset is None else np.ascontiguousarray(offset.T).reshape(groups, *shape),  # type: ignore[arg-type]
        is_int8=is_int8,
    )
