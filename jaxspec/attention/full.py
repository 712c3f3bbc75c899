"""Full attention."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.attention.metadata import AttentionMetadata, build, build_range, visible_range
from jaxspec.attention.rows import RowBlock


@dataclass(frozen=True)
class FullAttention:
    """Every row sees all positions up to its own."""


@visible_range.register
def _(kind: FullAttention, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(positions), positions


@build.register
def _(kind: FullAttention, block: RowBlock) -> AttentionMetadata:
    return build_range(block, None)
