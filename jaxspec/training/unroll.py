"""The training-time test: every row of a batch drafts several steps ahead, as inference would from it.

Row i pairs the feature at i with the token at i + 1. In draft step k it reads the token at i + 1 + k and
its own previous output, at position i + k, and sees the step-0 keys of the rows up to i and its own keys
of steps 1..k: what the cache holds when the engine drafts from row i. Rows never shift.

Source: EAGLE-3, arXiv 2503.01840; `SafeAILab/EAGLE` traineagle3/cnets.py.
"""

import jax

from jaxspec.attention import AttentionKind
from jaxspec.attention.metadata import visible_range
from jaxspec.drafters.base import Target
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.models.layers import Attention, RopeTables
from jaxspec.models.rope import rope_tables
from jaxspec.training.packed_rows import PackedRows, attend, shift_left, visible_rows

KeysValues = tuple[jax.Array, jax.Array]
Memory = tuple[tuple[KeysValues, ...], ...]
"""Keys and values [B, S, N, D] of every draft step so far, for every layer."""


def empty_memory(head: Eagle3) -> Memory:
    """Before draft step 0."""
    return ((),) * len(head.kinds)


def unroll_step(
    head: Eagle3, target: Target, rows: PackedRows, hidden: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Draft step k of every row, k being the number of steps that `memory` holds.

    Args:
      hidden: [B, S, M], `head.fuse` of the target's features at step 0, then what this returned.

    Returns:
      [B, S, M], which `head.logits` reads and the next step recycles, and the memory.
    """
    k = len(memory[0])
    positions = rows.positions + k
    rope = rope_tables(head.config.layers.rope, head.config.layers.head_dim, positions)
    embedded = head.embed(target, shift_left(rows.tokens, 1 + k))
    wide, residual = head.first.inputs(embedded, hidden)
    attended, keys_values = _attention(head.first.attention, head.kinds[0], wide, rope, rows, memory[0])
    x = head.first.feed_forward(residual + attended)
    new_memory = [keys_values]
    for layer, kind, layer_memory in zip(head.rest, head.kinds[1:], memory[1:], strict=True):
        normed = layer.input_norm(x)
        attended, keys_values = _attention(layer.attention, kind, normed, rope, rows, layer_memory)
        x = x + attended
        x = x + layer.mlp(layer.mlp_norm(x))
        new_memory.append(keys_values)
    return (head.norm(x) if head.config.norm_output else x), tuple(new_memory)


def _attention(
    attention: Attention,
    kind: AttentionKind,
    x: jax.Array,
    rope: RopeTables,
    rows: PackedRows,
    memory: tuple[KeysValues, ...],
) -> tuple[jax.Array, tuple[KeysValues, ...]]:
    queries, keys, values = attention.project(x, rope)
    memory = (*memory, (keys, values))
    k = len(memory) - 1
    first, _ = visible_range(kind, rows.positions + k)
    own = tuple((*memory[j], rows.positions + j >= first) for j in range(1, k + 1))
    attended = attend(queries, *memory[0], visible_rows(kind, rows, ahead=k), own)
    return attention.combine(attended), memory
