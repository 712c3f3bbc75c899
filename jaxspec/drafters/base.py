"""The contract between the engine and a drafter.

A drafter is an `nnx.Module`: static facts as plain attributes, arrays as parameters. The engine calls
`refresh` once per step over the rows that the target has just run, and `propose` once per step for K
drafts. It never asks which drafter it is.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxspec.attention import LayerCache, LayerCacheShape
from jaxspec.sampling import DraftVocabulary, SamplingMode, SamplingState

Target = Any
"""A target network of `jaxspec.models`, for drafters that share its embedding or its output head."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of one target forward pass, as a drafter needs them.

    Attributes:
      tokens: i32[B, Q], what the target read.
      next_tokens: i32[B, Q], the token after each row; at `last_row` the one just sampled.
      positions: i32[B, Q].
      valid: bool[B, Q], rows whose token stands; the others are computed and ignored.
      last_row: i32[B], the last valid row.
      hidden: [B, Q, M], the target's hidden states after its final norm.
      captured: one [B, Q, M] per entry of the drafter's `capture`.
      page_table: i32[B, T].
    """

    tokens: jax.Array
    next_tokens: jax.Array
    positions: jax.Array
    valid: jax.Array
    last_row: jax.Array
    hidden: jax.Array
    captured: tuple[jax.Array, ...]
    page_table: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a drafter may read when it proposes.

    Attributes:
      hidden: [B, M'], what `refresh` returned.
      history: i32[B, X], the tokens of each slot by position; what lies past `length` is stale.
      length: i32[B], position of the last token.
      active: bool[B].
      page_table: i32[B, T].
      sampling: of each slot.
    """

    hidden: jax.Array
    history: jax.Array
    length: jax.Array
    active: jax.Array
    page_table: jax.Array
    sampling: SamplingState

    @property
    def last_token(self) -> jax.Array:
        """i32[B]."""
        return jax.numpy.take_along_axis(self.history, self.length[:, None], axis=1, mode="clip")[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """K drafts per slot, with the distribution that they were drawn from.

    Attributes:
      tokens: i32[B, K], ids of the target's vocabulary.
      count: i32[B], how many of them are real.
      logits: f32[B, K, W], already divided by the temperature, such that softmax is exactly what each
        draft was drawn from; None where the drafts are one-hot.
    """

    tokens: jax.Array
    count: jax.Array
    logits: jax.Array | None


class Drafter(nnx.Module):
    """Base of all drafters.

    Attributes:
      num_speculative_tokens: K.
      capture: the target's hidden states that `refresh` reads: i is the stream before layer i.
      hidden_size: width of what `refresh` returns.
      trained_length: positions that its weights were made for; None where it has none.
    """

    num_speculative_tokens: int
    capture: tuple[int, ...] = ()
    hidden_size: int = 0
    trained_length: int | None = None

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """What each of its layers keeps in the paged cache; none for a drafter without attention."""
        return ()

    @property
    def draft_vocab(self) -> DraftVocabulary | None:
        """Which of the target's tokens it can draft; None for all of them, by the same ids."""
        return None

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Takes in the rows that the target ran; returns the state to draft from [B, M'] and the cache."""
        raise NotImplementedError

    def propose(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, mode: SamplingMode
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """Drafts K tokens. `mode` serves every slot; in `GREEDY` drafts are the most likely tokens."""
        raise NotImplementedError
