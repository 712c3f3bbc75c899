"""Blocks of ggml's formats as integers and scales."""

import gguf
import numpy as np

from jaxspec.checkpoints.blocks import Blocks


def unpack_ggml(packed: np.ndarray, kind: gguf.GGMLQuantizationType) -> Blocks | None:
    """The blocks of ggml's Q8_0, Q4_0 and Q4_1; None for its other kinds.

    Source: ggml-common.h, `block_q8_0`, `block_q4_0` and `block_q4_1`.

    Args:
      packed: u8[out, bytes of a row].
      kind: how they are packed.
    """
    if kind.name not in ("Q8_0", "Q4_0", "Q4_1"):
        return None
    blocks = packed.reshape(packed.shape[0], -1, gguf.GGML_QUANT_SIZES[kind][1])

    def halves(start: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype(np.float32)

    scale = halves(0)
    if kind.name == "Q8_0":
        return Blocks(blocks[..., 2:].view(np.int8).reshape(packed.shape[0], -1), scale, None)
    # The lower four bits of 16 bytes come before the upper ones.
    pairs = blocks[..., 4:] if kind.name == "Q4_1" else blocks[..., 2:]
    integers = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(packed.shape[0], -1)
    return Blocks(integers, scale, halves(2) if kind.name == "Q4_1" else -8 * scale)
