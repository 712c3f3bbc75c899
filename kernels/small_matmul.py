"""Tile sizes for products of few rows with a large weight, which are bound by reading the weight."""

from dataclasses import dataclass

import jax.numpy as jnp
import triton

# Beyond these rows the weight is no longer what the product waits for.
MAX_ROWS = 64
# Larger weights keep XLA's kernels near the memory's bandwidth; smaller ones are over before it is reached.
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
    block_rows = max(16, triton.next_power_of_2(rows))
    # Narrow tiles for a small weight, so that enough programs read it at once.
    block_outputs = 16
    while block_outputs < 64 and outputs // block_outputs > 256:
        block_outputs *= 2
    # About 64 KiB of weight in flight a program hides the memory's latency.
    block_width = 128 if block_outputs * weights <= 32 else 64
    stages = 4 if block_outputs * weights * block_width > 4096 else 6
    return Tiles(block_rows, block_width, block_outputs, warps=4, stages=stages)
