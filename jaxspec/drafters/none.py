"""No drafting: plain decoding runs through the same step, with K = 0."""

import jax
import jax.numpy as jnp

from jaxspec.attention import LayerCache
from jaxspec.drafters.base import Context, Drafter, Proposal, Rows, Target
from jaxspec.sampling import SamplingMode


class NoDrafter(Drafter):
    """Proposes nothing."""

    num_speculative_tokens = 0

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return jnp.zeros((len(rows.tokens), 0), rows.hidden.dtype), cache

    def propose(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, mode: SamplingMode
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        batch = context.length.shape[0]
        return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None), cache
