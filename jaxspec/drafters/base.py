"""The contract between the engine and a drafter.

A drafter is an `nnx.Module`: static facts are plain attributes, arrays are parameters. Its class checks
whether a checkpoint fits (`plan`) and describes checkpoints (`recognise`, `describe`). In every step the
engine calls `propose` for K drafts, and `refresh` on the rows that the target has just run. Neither the
engine nor the loading code depends on the kind of drafter.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
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
    output_rows,
    row_positions,
    take_rows,
)
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.config.drafter import MAX_DRAFTS
from jaxspec.config.errors import at_least
from jaxspec.drafters.flags import Flag
from jaxspec.files import Checkpoint, TensorSource, Tokenizer
from jaxspec.sampling import (
    Columns,
    Constrained,
    ConstrainedRows,
    DraftVocabulary,
    SamplingMode,
    SamplingState,
)
from jaxspec.weights.loading import IGNORED
from jaxspec.weights.packed_weights import Activations
from jaxspec.weights.parameters import Buffer


class Target(Protocol):
    """The part of a target network that the engine and drafters use.

    Attributes:
      config: the network's configuration.
      kinds: the kind of attention of every layer.
      embedding: the token embedding that heads share; maps ids i32[...] to [..., M].
    """

    config: ModelConfig
    kinds: tuple[AttentionKind, ...]
    embedding: Callable[[jax.Array], jax.Array]

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """The shape of every layer's cache."""
        ...

    @property
    def output_kernel(self) -> Any:
        """The output projection [M, V]: an array, or a `PackedWeight` of `jaxspec_kernels.matmul`."""
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
          memory: the memory of this pass, built for `kinds`.
          capture: hidden states to return. A number i below the number of layers stands for the residual
            stream before layer i. The number of layers stands for the stream after the last layer, before the
            final norm; it has only N' rows. `LAST_STREAMS` is that, too. Of several streams, the others are
            the mean.

        Returns:
          The hidden states after the final norm [N', M] of the rows whose output is needed (see `Memory`),
          the captured ones [N, M] each, and the memory.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V] from normed hidden states [..., M]; this device's part of V if V is split."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The N rows of one target forward pass, as a drafter needs them.

    Attributes:
      tokens: i32[N], the tokens that the target read.
      next_tokens: i32[N], the token after each row; for the last known token of a sequence, the one that was
        just sampled.
      hidden: [N, M], the target's hidden states after its final norm; None if the drafter says that it does
        not need them (`Needs.hidden`).
      captured: one [N, M] per entry of `Needs.capture`.
      blocks: the rows' positions and pages. Rows of committed tokens are valid; the others are computed and
        ignored. A block's `output` is the row of each group from which its slot may go on drafting.
    """

    tokens: jax.Array
    next_tokens: jax.Array
    hidden: jax.Array | None
    captured: tuple[jax.Array, ...]
    blocks: RowBlocks

    def outputs(self, x: jax.Array) -> jax.Array:
        """The rows of x [N, ...] whose state is needed, [N', ...]."""
        return take_rows(x, output_rows(self.blocks))

    @property
    def no_state(self) -> jax.Array:
        """[N', 0], the states of a drafter that keeps none."""
        return self.outputs(jnp.zeros((len(self.tokens), 0)))

    @property
    def positions(self) -> jax.Array:
        """The position of each row, i32[N]."""
        return row_positions(self.blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What a drafter may read when it proposes.

    Attributes:
      hidden: [B, M'], the output of `refresh` for the row before each slot's last token.
      history: i32[B, X], the tokens of each slot by position. Entries past `length` are stale. Those of a
        cached prefix are right only for a drafter that needs them (`Needs.history`).
      length: i32[B], position of the last token.
      active: bool[B], the slots to draft for.
      page_table: of shape [B, T].
      sampling: the sampling parameters of each slot.
      target_caches: those of the target's layers in `Needs.target_caches`. They hold the positions before the
        last token, and behind them what is left of rejected drafts.
      constrained: what changes the target's logits. A drafter that changes its own alike wastes fewer drafts;
        see `Drafter.constrained_rows`.
    """

    hidden: jax.Array
    history: jax.Array
    length: jax.Array
    active: jax.Array
    page_table: PageTable
    sampling: SamplingState
    constrained: Constrained = field(default_factory=Constrained.none)
    target_caches: tuple[LayerCache, ...] = ()

    @property
    def last_token(self) -> jax.Array:
        """The last token of each slot, i32[B]."""
        slots = jnp.arange(len(self.length), dtype=self.length.dtype)
        return self.history.at[slots, self.length].get(mode="clip", wrap_negative_indices=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """K drafts per slot, with the distribution that they were drawn from.

    Attributes:
      tokens: i32[B, K], ids of the target's vocabulary.
      count: i32[B], how many of them are drafts, 0 to K; the rest is ignored.
      logits: f32[B, K, W], already divided by the temperature: each draft was drawn from their softmax. This
        device's part of W if W is split. None if the drafts are one-hot.
      confidence: f32[B, K], the drafter's estimate of the probability that each draft is accepted if those
        before it are; None if it makes none. The engine does not read it yet.
    """

    tokens: jax.Array
    count: jax.Array
    logits: jax.Array | None
    confidence: jax.Array | None = None

    @classmethod
    def none(cls, batch_size: int) -> "Proposal":
        """Proposes nothing: K = 0."""
        return cls(jnp.zeros((batch_size, 0), jnp.int32), jnp.zeros(batch_size, jnp.int32), None)

    def with_more(self, count: int) -> "Proposal":
        """With so many columns more, of which none is a draft yet."""
        tokens = jnp.pad(self.tokens, ((0, 0), (0, count)))
        logits = None if self.logits is None else jnp.pad(self.logits, ((0, 0), (0, count), (0, 0)))
        confidence = None if self.confidence is None else jnp.pad(self.confidence, ((0, 0), (0, count)))
        return Proposal(tokens, self.count, logits, confidence)

    def first(self, count: int) -> "Proposal":
        """The first so many columns."""
        logits, confidence = (None if x is None else x[:, :count] for x in (self.logits, self.confidence))
        return Proposal(self.tokens[:, :count], jnp.minimum(self.count, count), logits, confidence)


@dataclass(frozen=True)
class Build:
    """How a drafter's weights are to be loaded.

    Attributes:
      dtype: the dtype of weights and cache.
      mesh: the devices that weights are split over; one by default.
      packed, codes, activations: see `ModulePlan.read`.
      tokenizer: the target's, to compare a draft model's with; None compares nothing.
      progress: shows progress bars for downloads.
      max_model_len: positions of the longest text, for a draft model; None takes as many as it supports.
    """

    dtype: jnp.dtype
    mesh: Mesh | None = None
    packed: bool = False
    codes: bool = False
    activations: Activations = "float32"
    tokenizer: Tokenizer | None = None
    progress: bool = True
    max_model_len: int | None = None

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 if self.mesh is None else self.mesh.size


@dataclass(frozen=True)
class Description:
    """What a drafter's checkpoint says about the drafter, without reading its weights.

    Attributes:
      target: the targets that it fits, in words.
      layers: the target's hidden states that it reads, in words.
      flags: the choices that decide how it computes, found or assumed.
      ignored: names of the tensors that loading ignores.
      stand_in: a made-up target with all that the checkpoint says about its target; None if it says nothing.
    """

    target: str = "unknown"
    layers: str = "unknown"
    flags: tuple[Flag, ...] = ()
    ignored: tuple[str, ...] = ()
    stand_in: ModelConfig | None = None


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the engine in every step.

    Attributes:
      hidden: the target's final hidden states, which `refresh` reads. Without them, the target computes them
        only for rows whose logits are needed.
      capture: other hidden states of the target that `refresh` reads, numbered as by `Target`.
      history: the tokens of `Context.history` before the last one, which `propose` reads. Without them,
        tokens found in the prefix cache are missing, since the host would take milliseconds to add a large
        batch's.
      state_size: M', the width of the state that `refresh` returns and the engine keeps for each slot.
      target_caches: the target's layers whose caches `propose` reads, in `Context.target_caches`.
      is_split: whether weights and caches are split over devices as the target's are. If not, every device
        has all of them, and drafting needs no communication.
    """

    hidden: bool = False
    capture: tuple[int, ...] = ()
    history: bool = False
    state_size: int = 0
    target_caches: tuple[int, ...] = ()
    is_split: bool = True


class Drafter(nnx.Module):
    """The base class of all drafters.

    Attributes:
      title: how messages call a checkpoint of it, with an article.
      ignored: name patterns of the tensors of a checkpoint that it does not use.
      weights_from, reads: see `jaxspec.config.drafter.DrafterKind`.
      num_speculative_tokens: the largest K.
      probabilistic: whether drafts are drawn from its distribution or are its most likely tokens.
      needs: what it needs of the engine.
      trained_length: the number of positions that it was trained on; None if it has no weights.
      target_ids: i32[W], the target's id of every draft id; None if the vocabularies are the same.
      draft_ids: i32[V], the inverse, -1 for ids that are never drafted; None if `target_ids` is.
    """

    title: ClassVar[str] = "a drafter"
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    weights_from: ClassVar[Literal["own", "target", "none"]] = "none"
    reads: ClassVar[tuple[str, ...]] = ("options",)
    num_speculative_tokens: int
    probabilistic: bool
    needs: Needs = Needs(hidden=True, history=True)
    trained_length: int | None = None
    target_ids: Buffer | None = None
    draft_ids: Buffer | None = None

    def __init__(self, *, num_speculative_tokens: int, probabilistic: bool = True):
        at_least("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
        self.num_speculative_tokens, self.probabilistic = int(num_speculative_tokens), probabilistic

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        """The producer of a checkpoint's format; None if the checkpoint does not hold such a drafter."""
        return None

    @classmethod
    def describe(cls, checkpoint: Checkpoint, target: ModelConfig | None) -> Description:
        """Describes a checkpoint of this kind; with a `target`, as it would be used with that target."""
        return Description()

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> "DrafterReader":
        """Checks that the drafter which `config` names fits the target, without reading weights.

        Raises:
          ConfigError: the drafter does not fit the target.
          CheckpointError: its checkpoint cannot be read, or a tensor is missing, unexpected or of another
            shape.
        """
        raise ConfigError(f"{cls.title} is made in Python: {cls.__name__} has no `plan` that loads it")

    def update_tensors(self, checkpoint: Checkpoint, target: Target) -> Checkpoint:
        """The checkpoint with the tensors that the drafter's parameters are made of, for new weights.

        Args:
          checkpoint: the drafter's new weights, by the names of its checkpoint.
        """
        return checkpoint

    def copies(self, target: Target) -> dict[str, TensorSource]:
        """The tensors of its checkpoint that are copies of the target's weights, read when they are used."""
        return {}

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """The shape of every layer's cache; empty for a drafter without attention."""
        return ()

    @property
    def draft_vocab(self) -> DraftVocabulary | None:
        """The target's tokens that it can draft; None if it drafts all of them and uses the target's ids."""
        if self.target_ids is None or self.draft_ids is None:
            return None
        return DraftVocabulary(self.target_ids[...], self.draft_ids[...])

    def to_target(self, tokens: jax.Array) -> jax.Array:
        """Maps draft ids to target ids."""
        return tokens if self.target_ids is None else jnp.take(self.target_ids[...], tokens, mode="clip")

    def constrained_rows(self, target: Target, context: Context, logits: jax.Array) -> ConstrainedRows | None:
        """What changes the rows that a block of drafts is drawn from; None if nothing does.

        Args:
          logits: [..., W] over the draft vocabulary, or this device's part of it.
        """
        if not context.constrained.asked:
            return None
        vocabulary = self.draft_vocab
        whole = target.config.vocab_size if vocabulary is None else vocabulary.target_ids.size
        return context.constrained.over(Columns.of(logits, whole, vocabulary))

    @abstractmethod
    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Updates the drafter's cache with the rows that the target has run.

        Returns:
          [N', M'], the state to draft from after each row that `rows.outputs` selects, and the cache.
        """

    @abstractmethod
    def propose(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """Drafts K tokens for each slot. Draft i must not depend on K.

        Args:
          num_drafts: K of this program, from 1 to the largest.
          mode: a mode that serves every slot; with `GREEDY`, drafts are the most likely tokens.

        Returns:
          The drafts, and the cache.
        """


DrafterReader = Callable[[Target], Drafter]
"""Reads the weights of a planned drafter; called with the target after the target's weights are loaded."""
