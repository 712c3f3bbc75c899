"""The contract between the engine and a drafter.

A drafter is an `nnx.Module`: static facts as plain attributes, arrays as parameters. The engine calls
`refresh` once per step over the rows that the target has just run, and `propose` once per step for K
drafts. It never asks which drafter it is.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    LayerCache,
    LayerCacheShape,
    PageTable,
    RowBlocks,
    row_positions,
)
from jaxspec.config import ModelConfig
from jaxspec.sampling import SamplingMode, SamplingState


class Target(Protocol):
    """What the engine and drafters use of a target network.

    Attributes:
      config: its shape.
      kinds: the kind of attention of every layer.
      embedding: the token embedding that heads share: [..., M] of ids i32[...].
    """

    config: ModelConfig
    kinds: tuple[AttentionKind, ...]
    embedding: Callable[[jax.Array], jax.Array]

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """What each layer keeps in the paged cache."""
        ...

    @property
    def output_kernel(self) -> Any:
        """[M, V], the output projection; an array, or packed as `jaxspec_kernels.matmul` takes it."""
        ...

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        memory: AnyMemory,
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...], AnyMemory]:
        """One forward pass over N rows.

        Args:
          tokens, positions: i32[N].
          memory: what these rows attend to, made for layers of `kinds`.
          capture: hidden states to return: i is the stream before layer i, the number of layers the output
            of the last one before the final norm.

        Returns:
          The hidden states after the final norm [N, M], the captured ones [N, M] each, and the memory.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[..., V] of hidden states after the final norm [..., M]."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The N rows of one target forward pass, as a drafter needs them.

    Attributes:
      tokens: i32[N], what the target read.
      next_tokens: i32[N], the token after each row; at the last valid row of a group that ends what is known
        of its sequence, the one just sampled.
      hidden: [N, M], the target's hidden states after its final norm.
      captured: one [N, M] per entry of the drafter's `capture`.
      blocks: the rows' places. Valid are those whose token stands; the others are computed and ignored.
    """

    tokens: jax.Array
    next_tokens: jax.Array
    hidden: jax.Array
    captured: tuple[jax.Array, ...]
    blocks: RowBlocks

    @property
    def positions(self) -> jax.Array:
        """i32[N]."""
        return row_positions(self.blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a drafter may read when it proposes.

    Attributes:
      hidden: [B, M'], what `refresh` returned for the row of each slot's last committed position.
      history: i32[B, X], the tokens of each slot by position; what lies past `length` is stale.
      length: i32[B], position of the last token.
      active: bool[B].
      page_table: of [B, T].
      sampling: of each slot.
    """

    hidden: jax.Array
    history: jax.Array
    length: jax.Array
    active: jax.Array
    page_table: PageTable
    sampling: SamplingState

    @property
    def last_token(self) -> jax.Array:
        """i32[B]."""
        return jnp.take_along_axis(self.history, self.length[:, None], axis=1, mode="clip")[:, 0]


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
      hidden_size: M', the width of what `refresh` returns.
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
    def draft_vocab(self) -> jax.Array | None:
        """i32[V], the draft id of every target id or -1; None where the two vocabularies are one."""
        return None

    @abstractmethod
    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Takes in the rows that the target ran.

        Returns:
          [N, M'], what may be drafted from behind every valid row, and the cache.
        """

    @abstractmethod
    def propose(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, mode: SamplingMode
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """Drafts K tokens. `mode` serves every slot; in `GREEDY` drafts are the most likely tokens."""

    def host_propose(self, compiled: "Compile", *, mode: SamplingMode) -> "HostPropose":
        """`propose` driven from Python: the oracle that the compiled form is held to.

        A drafter with a loop makes a program of each of its phases; this is one of the whole.
        """
        return compiled(
            lambda drafter, target, context, cache: drafter.propose(target, context, cache, mode=mode)
        )


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles function(drafter, target, context, state, ...) into one of (context, state, ...) that donates the
state."""

HostPropose = Callable[[Context, tuple[LayerCache, ...]], tuple[Proposal, tuple[LayerCache, ...]]]
"""A proposal and the cache, which is donated."""
