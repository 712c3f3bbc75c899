"""Unpacking the block formats of ggml to integers and scales."""

from collections.abc import Callable, Mapping, Sequence

import gguf
import numpy as np

from jaxspec.files.quantized.blocks import Blocks, stack


def unpack_ggml(packed: np.ndarray, kind: gguf.GGMLQuantizationType) -> Blocks | None:
    """The blocks of a matrix; None for formats without integers and scales, such as codebooks.

    Source: ggml-common.h, `block_q8_0` and the structs after it.

    Args:
      packed: u8[out, bytes per row].
      kind: the format.
    """
    unpack = _FORMATS.get(kind)
    if unpack is None:
        return None
    size, at_once = gguf.GGML_QUANT_SIZES[kind][1], max(_CACHED // packed.shape[1], 1)
    pieces: list[Blocks] = []
    for start in range(0, len(packed), at_once):
        rows = packed[start : start + at_once]
        with np.errstate(invalid="ignore"):  # NaN scales are found where they are used
            parts = unpack(rows.reshape(len(rows), -1, size))
        if parts is None:
            return None
        pieces.append(Blocks(*parts).map(lambda part: part.reshape(len(part), -1)))  # type: ignore[arg-type]
    return stack(pieces)


# The largest exponent of MXFP4 with finite values. Below 2 they may be subnormal, which products flush to 0.
_LARGEST_EXPONENT = 252
_IQ4 = np.asarray(gguf.quants.IQ4_NL.kvalues, np.int8)
"""The values of the codes of IQ4_NL and IQ4_XS."""

_CACHED = 1 << 18
"""Bytes that are unpacked at a time, so that intermediate results stay in a cache."""
_Parts = Sequence[np.ndarray | None]
"""The fields of `Blocks`, each of shape [out, blocks, …]."""


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """f32[out, blocks, 1]: the float16 that starts at byte `start` of every block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The lower four bits of all bytes, followed by the upper four."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> _Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """u8[out, blocks, 32]: 16 or 0 for every value, from the four bytes [out, blocks, 4] of fifth bits."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q5_0(blocks: np.ndarray) -> _Parts:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return (values - np.uint8(16)).view(np.int8), _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> _Parts:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return values.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _scales_of_k(blocks: np.ndarray) -> _Parts:
    """Scales and offsets of the eight sub-blocks, 6-bit integers, and their units."""
    low, mins, high = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([mins & 63, high >> 4 | mins >> 6 << 4], axis=-1)
    return scales.view(np.int8), minima.view(np.int8), _half(blocks, 0), -_half(blocks, 2)


def _pairs_of_k(packed: np.ndarray) -> np.ndarray:
    """u8[out, blocks, 8, 32]: four-bit values; each 32 bytes hold two sub-blocks."""
    return _nibbles(packed.reshape(*packed.shape[:2], 4, 32)).reshape(*packed.shape[:2], 8, 32)


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """u8[out, blocks, 2, 4, 32]: two-bit values; each 32 bytes hold 128 of them."""
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    return packed.reshape(*packed.shape[:2], -1, 1, 32) >> shifts & 3


def _q2_k(blocks: np.ndarray) -> _Parts:
    scales, minima = (part.view(np.int8) for part in (blocks[..., :16] & 15, blocks[..., :16] >> 4))
    return _pairs_of_bits(blocks[..., 16:80]), scales, minima, _half(blocks, 80), -_half(blocks, 82)


def _q3_k(blocks: np.ndarray) -> _Parts:
    bits = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _pairs_of_bits(blocks[..., 32:96])
    low_scales = _nibbles(blocks[..., 96:104])
    high_scales = blocks[..., None, 104:108] >> 2 * np.arange(4, dtype=np.uint8)[:, None] & 3
    scales = low_scales | high_scales.reshape(low_scales.shape) << 4
    scales, unit = (scales - np.uint8(32)).view(np.int8), _half(blocks, 108)
    # Values are 4 less than these integers.
    return low | bits.reshape(low.shape) << 2, scales, scales, unit, -4 * unit


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _pairs_of_k(blocks[..., 16:]), *_scales_of_k(blocks)


def _q5_k(blocks: np.ndarray) -> _Parts:
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (_pairs_of_k(blocks[..., 48:]) | bits << 4).view(np.int8), *_scales_of_k(blocks)


def _q6_k(blocks: np.ndarray) -> _Parts:
    shape = blocks.shape[:2]
    # For each 128 values, 64 bytes hold the lower four bits and 32 bytes the upper two.
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))
    high = _pairs_of_bits(blocks[..., 128:192])
    values = low | high.reshape(low.shape) << 4
    return (values - np.uint8(32)).view(np.int8), blocks[..., 192:208].view(np.int8), None, _half(blocks, 208)


def _iq4_nl(blocks: np.ndarray) -> _Parts:
    return _IQ4[_nibbles(blocks[..., 2:])], _half(blocks, 0)


def _iq4_xs(blocks: np.ndarray) -> _Parts:
    shape, step = blocks.shape[:2], np.arange(4, dtype=np.uint8)
    low = blocks[..., 4:8, None] >> 4 * step[:2] & 15
    high = blocks[..., 2:4, None] >> 2 * step & 3
    scales = low.reshape(*shape, 8) | high.reshape(*shape, 8) << 4
    values = _IQ4[_nibbles(blocks[..., 8:].reshape(*shape, 8, 16))]
    return values, (scales - np.uint8(32)).view(np.int8), None, _half(blocks, 0)


def _mxfp4(blocks: np.ndarray) -> _Parts | None:
    exponents, packed = blocks[..., :1], blocks[..., 1:]
    # The scale of the doubled values has an exponent that is smaller by 1.
    is_small = exponents < 2
    if exponents.max(initial=0) > _LARGEST_EXPONENT or (packed[is_small[..., 0]] & 0x77).any():
        return None
    return _nibbles(packed), np.where(is_small, np.uint8(0), exponents - np.uint8(1))


_KINDS: Mapping[str, Callable[[np.ndarray], _Parts | None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_FORMATS = {gguf.GGMLQuantizationType[name]: unpack for name, unpack in _KINDS.items()}
