"""Sliding-window attention."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.attention.metadata import AttentionMetadata, build, build_range, visible_range
from jaxspec.attention.rows import RowBlock


@dataclass(frozen=True)
class SlidingWindow:
    """Every row sees the last `size` positions, its own included."""

    size: int


@visible_range.register
def _(kind: SlidingWindow, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(positions - (kind.size - 1), 0), positions


@build.register
def _(kind: SlidingWindow, block: RowBlock) -> AttentionMetadata:
    return build_range(block, kind.size)
