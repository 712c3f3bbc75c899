"""The draft loop of all drafters that draft each token from the one before.

`start` samples the first draft and `step` each further one: it computes the positions and the attention
metadata, runs the network, writes the cache and draws into the step's column. The compiled program runs
`step` in a `fori_loop`; tests and inspection call the same functions one by one from Python.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxspec_kernels.gumbel_sample import gumbel_sample
from jaxspec_kernels.random import Purpose, draft_position

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    LayerCache,
    PagedMemory,
    RowBlock,
    RowBlocks,
    row_positions,
)
from jaxspec.drafters.base import Context, Drafter, Needs, Proposal, Rows, Target
from jaxspec.sampling import ConstrainedRows, SamplingMode
from jaxspec.sharding import split_over


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """The carry of the draft loop.

    Attributes:
      hidden: [B, M'], the input of the next step.
      tokens: i32[B, K], ids of the draft vocabulary, filled up to the current column.
      logits: f32[B, K, W], the logits that each draft was drawn from, or this device's part of W; None if
        drafts are the most likely tokens.
      cache: the cache of the drafter's layers.
      constrained: what the rows of the drafts share; None if nothing constrains them.
      automaton: i32[B], the states of grammars before the draft that was drawn last; stale without grammars.
    """

    hidden: jax.Array
    tokens: jax.Array
    logits: jax.Array | None
    cache: tuple[LayerCache, ...]
    constrained: ConstrainedRows | None
    automaton: jax.Array


class AutoregressiveDrafter(Drafter):
    """A drafter whose network drafts one token at a time.

    Attributes:
      kinds: the kind of attention of each of its layers.
      lead: 0 for EAGLE, whose row at position p pairs the target's feature at p with the token at p + 1; 1
        for a draft model, whose row at position p reads the token at p. Draft step i runs at position
        length - 1 + lead + i.
      draft_vocab_size: W.
      is_trainable: whether `jaxspec.lab.training` can train it: it drafts from what `fuse` returns, and
        its logits are those of `project`.
    """

    is_trainable: ClassVar[bool] = False
    needs = Needs(hidden=True)
    kinds: tuple[AttentionKind, ...]
    draft_vocab_size: int
    lead: int = 0

    @abstractmethod
    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        """Runs the network over N rows.

        Args:
          tokens: i32[N], ids of the target's vocabulary.
          hidden: [N, M'], features in a refresh, the previous step's output in the draft loop.
          positions: i32[N].
          memory: the memory of this pass, built for `kinds`.

        Returns:
          [N', M'], the input of `logits` and of the next step for the rows whose output is needed (see
          `Memory`), and the memory.
        """

    def logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., W] from the output of `advance`; this device's part of W if W is split."""
        return self.project(target, self.normed(hidden))

    def normed(self, hidden: jax.Array) -> jax.Array:
        """The state [..., M] that the output rows read, from the output of `advance`; by default that."""
        return hidden

    def project(self, target: Target, state: jax.Array, *, out_dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Logits [..., W] from the result of `normed`; by default the target's."""
        return target.logits(state).astype(out_dtype)

    def fuse(self, hidden: jax.Array | None, captured: tuple[jax.Array, ...]) -> jax.Array:
        """The feature of every row, [N, M'], from the target's hidden states; by default the final ones.

        Args:
          hidden: [N, M], after the final norm; None unless `Needs.hidden` asks for it.
          captured: one [N, M] per entry of `Needs.capture`.
        """
        assert hidden is not None
        return hidden

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """By default, the row at position p pairs the feature at p with the token at p + 1."""
        return self.run(target, rows.next_tokens, self.fuse(rows.hidden, rows.captured), rows.blocks, cache)

    def run(
        self,
        target: Target,
        tokens: jax.Array,
        hidden: jax.Array,
        blocks: RowBlocks,
        cache: tuple[LayerCache, ...],
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Runs `advance` over the paged cache: returns its output [N', M'] and the cache."""
        memory = PagedMemory.build(self.kinds, cache, blocks)
        hidden, memory = self.advance(target, tokens, hidden, row_positions(blocks), memory)
        return hidden, memory.caches

    def start(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> DraftState:
        """Samples the first of K drafts from the hidden state that `refresh` returned."""
        batch = context.length.shape[0]
        tokens = jnp.zeros((batch, num_drafts), jnp.int32)
        row, logits = self.logits(target, context.hidden), None
        if mode > SamplingMode.GREEDY and self.probabilistic:
            logits = jnp.zeros((batch, num_drafts, row.shape[-1]), jnp.float32)
        constrained = self.constrained_rows(target, context, row)
        state = DraftState(context.hidden, tokens, logits, cache, constrained, context.constrained.automaton)
        return self._draw(row, context, state, jnp.int32(0))

    def step(self, target: Target, context: Context, state: DraftState, i: jax.Array) -> DraftState:
        """Drafts token i (1 <= i < K) from draft i - 1."""
        previous = lax.dynamic_index_in_dim(
            state.tokens, i - 1, axis=1, keepdims=False, allow_negative_indices=False
        )
        previous, automaton = self.to_target(previous), state.automaton
        if state.constrained is not None:
            previous, automaton = state.constrained.follow(automaton, previous)
        hidden, cache = self.run_ahead(target, context, previous, state.hidden, state.cache, i)
        state = replace(state, hidden=hidden, cache=cache, automaton=automaton)
        return self._draw(self.logits(target, hidden), context, state, i)

    def run_ahead(
        self,
        target: Target,
        context: Context,
        tokens: jax.Array,
        hidden: jax.Array,
        cache: tuple[LayerCache, ...],
        i: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Runs the row that draft i is drawn from.

        Args:
          tokens: i32[B], draft i - 1, as ids of the target's vocabulary.
          hidden: [B, M'], what this returned for draft i - 1.

        Returns:
          [B, M'], and the cache.
        """
        positions = context.length - 1 + self.lead + i
        block = RowBlock(positions[:, None], context.active[:, None], context.page_table)
        return self.run(target, tokens, hidden, (block,), cache)

    def finish(self, context: Context, state: DraftState) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """The drafts in the form that the engine takes, and the cache."""
        count = jnp.where(context.active, state.tokens.shape[1], 0).astype(jnp.int32)
        return Proposal(self.to_target(state.tokens), count, state.logits), state.cache

    def propose(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        state = self.start(target, context, cache, num_drafts=num_drafts, mode=mode)
        state = lax.fori_loop(1, num_drafts, lambda i, state: self.step(target, context, state, i), state)
        return self.finish(context, state)

    def _draw(self, row: jax.Array, context: Context, state: DraftState, i: jax.Array) -> DraftState:
        """Draws draft i from `row`, the output of `logits`, into column i."""
        if state.constrained is not None:
            drafts, automata = self.to_target(state.tokens), state.automaton[:, None]
            row = state.constrained.apply(row[:, None], drafts, i, is_draft=True, automata=automata)[:, 0]
        tokens, logits = gumbel_sample(
            row,
            context.sampling.temperature,
            context.sampling.seed,
            draft_position(context.length, i),
            i,
            state.tokens,
            state.logits,
            purpose=Purpose.DRAFT,
            axis=split_over(row.shape[-1], self.draft_vocab_size),
        )
        return replace(state, tokens=tokens, logits=logits)
