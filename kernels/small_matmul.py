"""Tile sizes for products of few rows with a large weight, which are bound by reading the weight."""

from dataclasses import dataclass

import jax.numpy as jnp

# One tile of rows: with 40 rows, SmolLM2-135M's step took 1.55 ms (H100); left to XLA, 1.16 (H200).
MAX_ROWS = 16
# XLA's kernels read larger weights near the memory's bandwidth: Llama-3-8B's step took 6.6 ms with them and
# 8.2 with these (H100).
MAX_WEIGHT_BYTES = 16 << 20


@dataclass(frozen=True)
class Tiles:
    """Rows, summed width and outputs of one program's tile, and Triton's launch options."""

    rows: int
    width: int
    outputs: int
    warps: int
    stages: int


def pick_tiles(rows: int, width: int, outputs: int, dtype: jnp.dtype, *, weights: int = 1) -> Tiles | None:
    """Tiles of [rows, width] x [width, outputs]; None where XLA's product is the better one.

    Args:
      rows, width, outputs: sizes of the product.
      dtype: of both operands.
      weights: tiles of the weight that a program reads side by side.
    """
    weight_bytes = 2 * weights * width * outputs
    if dtype != jnp.bfloat16 or not 0 < rows <= MAX_ROWS or weight_bytes > MAX_WEIGHT_BYTES:
        return None
    # Narrow tiles for a small weight, so that enough programs read it at once.
    block_outputs = 16
    while block_outputs < 64 and outputs // block_outputs > 256:
        block_outputs *= 2
    # About 64 KiB of weight in flight a program hides the memory's latency.
    block_width = 128 if block_outputs * weights <= 32 else 64
    stages = 4 if block_outputs * weights * block_width > 4096 else 6
    return Tiles(16, block_width, block_outputs, warps=4, stages=stages)
