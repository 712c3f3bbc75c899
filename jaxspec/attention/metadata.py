"""Attention metadata: what a layer must know about positions, made afresh wherever positions move.

`build_metadata` is the only way to obtain it. It is a pure function of the kind of attention, the
positions and the page table, and it is called inside the traced programs: in prefill, in verify and in
every iteration of the draft loop. Nothing position-dependent outlives the forward pass it was built
for, so nothing can be stale.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import singledispatch

import jax
import jax.numpy as jnp
from jaxspec_kernels.slot_mapping import slot_mapping


@dataclass(frozen=True)
class FullAttention:
    """Every row sees all positions up to its own."""


@dataclass(frozen=True)
class SlidingWindow:
    """Every row sees the last `size` positions, its own included."""

    size: int


AttentionKind = FullAttention | SlidingWindow


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rows of one forward pass write, and what they see.

    Attributes:
      slots: i32[B, Q], page * P + offset to write; in page 0 for a row that is not kept.
      first: i32[B, Q], first visible position.
      last: i32[B, Q], last visible position, inclusive; -1 for a row that is not kept.
      page_table: i32[B, T].
    """

    slots: jax.Array
    first: jax.Array
    last: jax.Array
    page_table: jax.Array


@singledispatch
def visible_range(kind: AttentionKind, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and last visible position, i32[B, Q] each, of rows at `positions` i32[B, Q]."""
    raise TypeError(f"no attention metadata builder for {kind!r}")


@visible_range.register
def _(kind: FullAttention, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(positions), positions


@visible_range.register
def _(kind: SlidingWindow, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(positions - (kind.size - 1), 0), positions


def build_metadata(
    kinds: Iterable[AttentionKind],
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    *,
    page_size: int,
) -> dict[AttentionKind, AttentionMetadata]:
    """Builds the metadata of every kind of attention that a network uses.

    Args:
      kinds: the kinds, repeated or not.
      positions: i32[B, Q], the position of each row in its sequence.
      valid: bool[B, Q]; a row that is not valid writes to page 0 and sees nothing, and so does one whose
        position has no page: it would see page 0, where anything may lie.
      page_table: i32[B, T], 0 where the slot owns no page.
      page_size: positions per page.
    """
    slots = slot_mapping(positions, valid, page_table, page_size=page_size)
    kept = slots >= page_size

    def build(kind: AttentionKind) -> AttentionMetadata:
        first, last = visible_range(kind, positions)
        return AttentionMetadata(
            slots=slots, first=first, last=jnp.where(kept, last, -1), page_table=page_table
        )

    return {kind: build(kind) for kind in dict.fromkeys(kinds)}
