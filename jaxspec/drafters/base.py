"""The contract between the engine and a drafter.

A drafter is an `nnx.Module`: static facts as plain attributes, arrays as parameters. Its class finds out
whether a checkpoint fits (`plan`), and says what a checkpoint is (`recognise`, `describe`). The engine calls
`refresh` once per step over the rows that the target has just run, and `propose` once per step for K
drafts. Neither the engine nor loading ever asks which drafter it is.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    LayerCache,
    LayerCacheShape,
    PageTable,
    RowBlocks,
    row_positions,
)
from jaxspec.checkpoints import Checkpoint
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.drafters.flags import Flag
from jaxspec.models.packed_weights import Activations
from jaxspec.sampling import DraftVocabulary, SamplingMode, SamplingState


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
        """f32[..., V] of hidden states after the final norm [..., M]; where the rows of V are split over
        devices, this one's part."""
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
        draft was drawn from, or this device's part of W; None where the drafts are one-hot.
    """

    tokens: jax.Array
    count: jax.Array
    logits: jax.Array | None


@dataclass(frozen=True)
class Build:
    """How the engine wants a drafter's arrays.

    Attributes:
      dtype: of weights and cache.
      mesh: the devices that weights are split over; one by default.
      packed, activations: see `ModulePlan.read`.
    """

    dtype: jnp.dtype
    mesh: Mesh | None = None
    packed: bool = False
    activations: Activations = "float32"


@dataclass(frozen=True)
class Description:
    """What is known of a drafter's checkpoint without reading its weights.

    Attributes:
      target: the targets that it fits, in words.
      layers: the target's hidden states that it reads, in words.
      flags: what decides how it computes, found or assumed.
      ignored: names of the tensors that loading leaves out.
      stand_in: a target that it fits as far as it says itself; None where it does not say.
    """

    target: str = "unknown"
    layers: str = "unknown"
    flags: tuple[Flag, ...] = ()
    ignored: tuple[str, ...] = ()
    stand_in: ModelConfig | None = None


class Drafter(nnx.Module):
    """Base of all drafters.

    Attributes:
      title: what a checkpoint of it is called, with its article.
      weights_from: see `jaxspec.config.drafter.DrafterKind`.
      num_speculative_tokens: K. It is made with the largest one; a program of fewer drafts sets its own, 1 at
        least, before it calls `propose`. Draft i is the same in all of them.
      probabilistic: draw drafts from its distribution, or take its most likely tokens.
      capture: the target's hidden states that `refresh` reads: i is the stream before layer i.
      hidden_size: M', the width of what `refresh` returns.
      trained_length: positions that its weights were made for; None where it has none.
      is_split: its weights and caches are split over several devices as the target's are; otherwise they are
        whole on each, and drafting needs nothing from the others.
    """

    title: ClassVar[str] = "a drafter"
    weights_from: ClassVar[Literal["own", "target", "none"]] = "none"
    num_speculative_tokens: int
    probabilistic: bool
    capture: tuple[int, ...] = ()
    hidden_size: int = 0
    trained_length: int | None = None
    is_split: bool = True

    def __init__(self, *, num_speculative_tokens: int, probabilistic: bool = True):
        self.num_speculative_tokens, self.probabilistic = num_speculative_tokens, probabilistic

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        """Whose format a checkpoint is in; None where it holds no such drafter."""
        return None

    @classmethod
    def describe(cls, checkpoint: Checkpoint, target: ModelConfig | None) -> Description:
        """What a checkpoint of it holds, and where a target is given, what that means for this one."""
        return Description()

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> "DrafterReader":
        """Finds out whether `config` fits the target; no weights are read yet.

        Raises:
          ConfigError: it does not fit the target.
          CheckpointError: its checkpoint cannot be read, or holds other tensors than it should.
        """
        raise ConfigError(f"{cls.title} is made in Python: {cls.__name__} has no `plan` that loads it")

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """What each of its layers keeps in the paged cache; none for a drafter without attention."""
        return ()

    @property
    def draft_vocab(self) -> DraftVocabulary | None:
        """Which of the target's tokens it can draft; None for all of them, by the same ids."""
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


DrafterReader = Callable[[Target], Drafter]
"""Reads the weights of a drafter that has been found to fit; called with its target's weights in place."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles function(drafter, target, context, state, ...) into one of (context, state, ...) that donates the
state."""

HostPropose = Callable[[Context, tuple[LayerCache, ...]], tuple[Proposal, tuple[LayerCache, ...]]]
"""A proposal and the cache, which is donated."""
