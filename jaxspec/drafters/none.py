"""The drafter of plain decoding: K = 0 in the same step."""

import jax
import jax.numpy as jnp

from jaxspec.attention import LayerCache
from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Context, Drafter, DrafterReader, Proposal, Rows, Target
from jaxspec.sampling import SamplingMode


class NoDrafter(Drafter):
    """Proposes nothing."""

    reads_hidden = reads_history = False

    def __init__(self) -> None:
        super().__init__(num_speculative_tokens=0)

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
        return lambda _: cls()

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return rows.no_state, cache

    def propose(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, mode: SamplingMode
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        batch = context.length.shape[0]
        return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None), cache
