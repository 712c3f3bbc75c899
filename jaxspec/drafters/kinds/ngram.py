"""Prompt lookup: drafts the tokens that followed the last n tokens at an earlier occurrence.

Source: A. Saxena, "Prompt Lookup Decoding", 2023; vLLM's n-gram speculator. This one runs on the device and
prefers the longest match, then the most recent one. If the match reaches the end of the text, the drafts
repeat periodically: after "a b a b" it drafts "a b a b" again.
"""

import jax
import jax.numpy as jnp

from jaxspec.attention import LayerCache
from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Context, Drafter, DrafterReader, Needs, Proposal, Rows, Target
from jaxspec.sampling import SamplingMode


class NGramDrafter(Drafter):
    """One-hot proposals from each slot's own token history, without weights or a cache.

    Args:
      max_ngram: the longest run of last tokens to match.
      min_ngram: the shortest run that counts as a match.
    """

    needs = Needs(history=True)
    reads = ("max_ngram", "min_ngram")

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
        tokens, count = lookup(
            context.history,
            context.length,
            num_drafts=num_drafts,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        return Proposal(tokens, jnp.where(context.active, count, 0), None), cache


def lookup(
    history: jax.Array, last: jax.Array, *, num_drafts: int, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the best earlier occurrence of each slot's last tokens, and the tokens that followed it.

    Args:
      history: i32[B, X], tokens by position; entries past `last` are ignored.
      last: i32[B], position of the last token.
      num_drafts: K.
      max_ngram: the longest run of last tokens to match.
      min_ngram: the shortest one that counts as a match.

    Returns:
      The drafts i32[B, K], and their number i32[B]: K, or 0 without a match.
    """
    width = history.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None, :]
    end = last[:, None]
    running = (position < end) & (end > 0)
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(max_ngram):
        wanted = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        # Column p of `shifted` holds the token at p - back.
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
