"""Drafters that run one pass over a block of rows for all K drafts."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.gumbel_sample import gumbel_sample
from jaxspec_kernels.random import Purpose, draft_position

from jaxspec.attention import LayerCache
from jaxspec.drafters.base import Context, Drafter, Proposal, Target
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import split_over

Correction = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""Takes the index of a draft, the token before it i32[B] as an id of the target, and a state; returns what is
added to the draft's row, f32[B, W] or this device's part of W, and the next state."""


class OnePassDrafter(Drafter):
    """A drafter whose network runs once per proposal.

    Attributes:
      draft_vocab_size: W.
    """

    draft_vocab_size: int

    @abstractmethod
    def block_logits(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, num_drafts: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Logits f32[B, K, W] of all K drafts, or this device's part of W, and the cache."""

    def propose(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        logits, cache = self.block_logits(target, context, cache, num_drafts=num_drafts)
        return self.draw(target, context, logits, mode=mode), cache

    def draw(
        self,
        target: Target,
        context: Context,
        logits: jax.Array,
        *,
        mode: SamplingMode,
        correction: Correction | None = None,
        state: jax.Array | None = None,
    ) -> Proposal:
        """Draws all K drafts: at once, or in turn if a row depends on the drafts before it.

        Args:
          logits: f32[B, K, W], or this device's part of W.
          correction: what the token before a draft adds to its row; None for nothing.
          state: what `correction` is given for the first draft.
        """
        probabilistic = mode > SamplingMode.GREEDY and self.probabilistic
        axis = split_over(logits.shape[-1], self.draft_vocab_size)
        constrained = self.constrained_rows(target, context, logits)

        def draw(i: jax.Array, drawn: tuple) -> tuple:
            tokens, processed, automaton, last, state = drawn
            row = lax.dynamic_index_in_dim(logits, i, axis=1, allow_negative_indices=False)
            if correction is not None:
                added, state = correction(i, last, state)
                row += added[:, None]
            if constrained is not None:
                drafts = self.to_target(tokens)
                row = constrained.apply(row, drafts, i, is_draft=True, automata=automaton[:, None])
            tokens, processed = gumbel_sample(
                row[:, 0],
                context.sampling.temperature,
                context.sampling.seed,
                draft_position(context.length, i),
                i,
                tokens,
                processed,
                purpose=Purpose.DRAFT,
                axis=axis,
            )
            last = lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False, allow_negative_indices=False)
            last = self.to_target(last)
            if constrained is not None:
                automaton = constrained.follow(automaton, last)[1]
            return tokens, processed, automaton, last, state

        if constrained is None and correction is None:
            tokens, drawn = draw_block(logits, context, probabilistic=probabilistic, axis=axis)
        else:
            none = jnp.zeros(logits.shape[:2], jnp.int32), jnp.zeros_like(logits) if probabilistic else None
            start = (*none, context.constrained.automaton, context.last_token, state)
            tokens, drawn = lax.fori_loop(0, logits.shape[1], draw, start)[:2]
        count = jnp.where(context.active, logits.shape[1], 0).astype(jnp.int32)
        return Proposal(self.to_target(tokens), count, drawn)


def draw_block(
    logits: jax.Array, context: Context, *, probabilistic: bool, axis: str | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Draws every draft of a block, with the same noise as the draft loop.

    Args:
      logits: f32[B, K, W].
      probabilistic: False takes the most likely tokens.
      axis: the mesh axis that W is split over, `logits` being this device's part.

    Returns:
      Drafts i32[B, K] as ids of the draft vocabulary, and the logits f32[B, K, W] that they were drawn from,
      or None.
    """
    batch, num_drafts, width = logits.shape
    positions = draft_position(context.length[:, None], jnp.arange(num_drafts, dtype=jnp.int32))
    rows = batch * num_drafts
    tokens, drawn = gumbel_sample(
        logits.reshape(rows, width),
        jnp.repeat(context.sampling.temperature, num_drafts),
        jnp.repeat(context.sampling.seed, num_drafts, axis=0),
        positions.reshape(rows),
        jnp.int32(0),
        jnp.zeros((rows, 1), jnp.int32),
        jnp.zeros((rows, 1, width), jnp.float32) if probabilistic else None,
        purpose=Purpose.DRAFT,
        axis=axis,
    )
    return tokens.reshape(batch, num_drafts), None if drawn is None else drawn.reshape(logits.shape)
