"""Random quantized blocks, and their values by ggml's formulas, one scalar at a time.

Layouts: ggml's `block_q8_0`, `block_q4_0`, … in ggml-common.h. All scales are finite float16.
"""

from collections.abc import Callable

import gguf
import numpy as np

F32 = np.float32


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Packed rows, uint8 [rows, blocks * bytes per block]."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for start in SCALES[kind]:
        scales = rng.uniform(-2, 2, (rows, blocks, 1)).astype("<f2")
        packed[:, :, start : start + 2] = scales.view(np.uint8)
    return packed.reshape(rows, -1)


def expected_values(kind: str, packed: np.ndarray) -> np.ndarray:
    """float32 [rows, values]."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    return np.array([np.concatenate([VALUES[kind](b) for b in row.reshape(-1, size)]) for row in packed])


def _half(block: np.ndarray, start: int) -> np.float32:
    return F32(block[start : start + 2].view("<f2")[0])


def _q8_0(block: np.ndarray) -> list[np.float32]:
    return [_half(block, 0) * F32(q) for q in block[2:].view(np.int8)]


def _nibbles(packed: np.ndarray) -> list[int]:
    return [int(b) & 15 for b in packed] + [int(b) >> 4 for b in packed]


def _q4_0(block: np.ndarray) -> list[np.float32]:
    return [_half(block, 0) * F32(q - 8) for q in _nibbles(block[2:])]


def _q4_1(block: np.ndarray) -> list[np.float32]:
    return [_half(block, 0) * F32(q) + _half(block, 2) for q in _nibbles(block[4:])]


def _q5_0(block: np.ndarray) -> list[np.float32]:
    high = int.from_bytes(block[2:6].tobytes(), "little")
    return [_half(block, 0) * F32((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(_nibbles(block[6:]))]


def _six_bit(scales: np.ndarray, j: int) -> tuple[int, int]:
    """Scale and minimum of sub-block j out of 12 bytes."""
    s = [int(b) for b in scales]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def _q4_k(block: np.ndarray) -> list[np.float32]:
    return _sub_blocks(block, _pairs(block[16:]))


def _q5_k(block: np.ndarray) -> list[np.float32]:
    low = _pairs(block[48:])
    return _sub_blocks(block, [q + 16 * (int(block[16 + i % 32]) >> i // 32 & 1) for i, q in enumerate(low)])


def _pairs(packed: np.ndarray) -> list[int]:
    """32 bytes hold 32 low and then 32 high nibbles."""
    return [q for start in range(0, len(packed), 32) for q in _nibbles(packed[start : start + 32])]


def _sub_blocks(block: np.ndarray, quants: list[int]) -> list[np.float32]:
    scales = [_six_bit(block[4:16], j) for j in range(8)]
    return [
        _half(block, 0) * F32(scales[i // 32][0]) * F32(q) - _half(block, 2) * F32(scales[i // 32][1])
        for i, q in enumerate(quants)
    ]


def _q6_k(block: np.ndarray) -> list[np.float32]:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    values = []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        nibble = int(low[64 * half + 32 * (quarter % 2) + lane]) >> 4 * (quarter // 2) & 15
        top = int(high[32 * half + lane]) >> 2 * quarter & 3
        values.append(_half(block, 208) * F32(scales[i // 16]) * F32((nibble | top << 4) - 32))
    return values


SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
VALUES: dict[str, Callable[[np.ndarray], list[np.float32]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
