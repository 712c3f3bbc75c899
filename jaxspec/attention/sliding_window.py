"""Sliding-window attention."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.attention.metadata import AttentionMetadata, PlacedRows, build, build_range, visible_range


@dataclass(frozen=True)
class SlidingWindow:
    """Every row sees the last `size` positions, its own included."""

    size: int


@visible_range.register
def _(kind: SlidingWindow, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(positions - (kind.size - 1), 0), positions


@build.register
def _(kind: SlidingWindow, rows: PlacedRows) -> AttentionMetadata:
    return build_range(kind, rows)
