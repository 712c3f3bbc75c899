"""The training-time test: every row of a batch drafts several steps ahead, as in inference.

Row i pairs the feature at i with the token at i + 1. In draft step k, at position i + k, it reads the token
at i + 1 + k and its own output of the previous step. It attends to the step-0 keys of the rows up to i and to
its own keys of steps 1 to k, which are the keys in the cache when the engine drafts from row i.

Source: EAGLE-3, arXiv 2503.01840; `SafeAILab/EAGLE` traineagle3/cnets.py.
"""

import jax

from jaxspec.attention import PackedMemory
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Target
from jaxspec.lab.training.packed_rows import PackedRows, shift_left


def unroll_step(
    head: AutoregressiveDrafter, target: Target, rows: PackedRows, hidden: jax.Array, memory: PackedMemory
) -> tuple[jax.Array, PackedMemory]:
    """Draft step k of every row, where k is the number of steps in `memory`.

    Args:
      head, target: the head and its target.
      rows: the batch.
      hidden: [B * S, M], at step 0 `head.fuse` of the target's features, then the previous step's result.
      memory: the keys and values of the steps so far.

    Returns:
      Hidden states [B * S, M], for `head.logits` and the next step, and the memory.
    """
    tokens = shift_left(rows.tokens, 1 + memory.ahead)
    positions = rows.positions + memory.ahead
    return head.advance(target, tokens.reshape(-1), hidden, positions.reshape(-1), memory)
