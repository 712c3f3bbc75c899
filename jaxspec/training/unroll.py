"""The training-time test: every row of a batch drafts several steps ahead, as inference would from it.

Row i pairs the feature at i with the token at i + 1. In draft step k it reads the token at i + 1 + k and
its own previous output, at position i + k, and sees the step-0 keys of the rows up to i and its own keys
of steps 1..k: what the cache holds when the engine drafts from row i. Rows never shift.

Source: EAGLE-3, arXiv 2503.01840; `SafeAILab/EAGLE` traineagle3/cnets.py.
"""

import jax

from jaxspec.attention import PackedMemory
from jaxspec.drafters.base import Target
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.training.packed_rows import PackedRows, shift_left


def unroll_step(
    head: Eagle3, target: Target, rows: PackedRows, hidden: jax.Array, memory: PackedMemory
) -> tuple[jax.Array, PackedMemory]:
    """Draft step k of every row, k being the number of steps that `memory` holds.

    Args:
      hidden: [B * S, M], `head.fuse` of the target's features at step 0, then what this returned.

    Returns:
      [B * S, M], which `head.logits` reads and the next step recycles, and the memory.
    """
    tokens = shift_left(rows.tokens, 1 + memory.ahead)
    positions = rows.positions + memory.ahead
    return head.advance(target, tokens.reshape(-1), hidden, positions.reshape(-1), memory)
