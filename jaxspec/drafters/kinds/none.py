"""The drafter of plain decoding: K = 0 in the same step."""

import jax

from jaxspec.attention import LayerCache
from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Context, Drafter, DrafterReader, Needs, Proposal, Rows, Target
from jaxspec.sampling import SamplingMode


class NoDrafter(Drafter):
    """Proposes nothing."""

    needs = Needs()

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
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        return Proposal.none(len(context.length)), cache
