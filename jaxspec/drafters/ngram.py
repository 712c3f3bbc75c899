"""Drafting by prompt lookup: repeat what followed the last tokens the last time they occurred.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; vLLM's n-gram speculator. This one runs on the
device, prefers the longest match and then the most recent one, and goes round when the match overlaps
the end: after "a b a b" it drafts "a b a b" again.
"""

import jax
import jax.numpy as jnp

from jaxspec.attention import LayerCache
from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Context, Drafter, DrafterReader, Proposal, Rows, Target
from jaxspec.sampling import SamplingMode


class NGramDrafter(Drafter):
    """One-hot proposals out of each slot's own token history; no weights, no cache."""

    def __init__(self, num_speculative_tokens: int, *, max_ngram: int = 3, min_ngram: int = 1):
        super().__init__(num_speculative_tokens=num_speculative_tokens)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
        drafter = cls(config.num_drafts, max_ngram=config.max_ngram, min_ngram=config.min_ngram)
        return lambda _: drafter

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return jnp.zeros((len(rows.tokens), 0), rows.hidden.dtype), cache

    def propose(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, mode: SamplingMode
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        tokens, count = lookup(
            context.history,
            context.length,
            num_drafts=self.num_speculative_tokens,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        return Proposal(tokens, jnp.where(context.active, count, 0), None), cache


def lookup(
    history: jax.Array, last: jax.Array, *, num_drafts: int, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the best earlier occurrence of each row's last tokens, and what followed it.

    Args:
      history: i32[B, X], tokens by position; what lies past `last` is ignored.
      last: i32[B], position of the last token.
      num_drafts: K.
      max_ngram: the longest run of last tokens to match.
      min_ngram: the shortest one that counts as a match.

    Returns:
      i32[B, K] drafts, and i32[B] their number: K, or 0 without a match.
    """
    width = history.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None, :]
    end = last[:, None]
    running = (position < end) & (end > 0)
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(max_ngram):
        wanted = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        # Shifted right by `back`: column p holds the token at p - back. Columns below are cut off.
        shifted = jnp.pad(history, ((0, 0), (back, 0)))[:, :width]
        running &= (shifted == wanted) & (position >= back) & (end >= back)
        matched += running
    score = jnp.where(matched >= min_ngram, matched * width + position, -1)
    best = score.argmax(axis=1).astype(jnp.int32)[:, None]
    found = jnp.take_along_axis(score, best, axis=1)[:, 0] >= 0
    period = jnp.maximum(end - best, 1)
    step = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    drafts = jnp.take_along_axis(history, best + 1 + step % period, axis=1, mode="clip")
    return drafts, jnp.where(found, num_drafts, 0).astype(jnp.int32)
