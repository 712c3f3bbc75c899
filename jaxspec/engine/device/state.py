"""The state that stays on the device between dispatches, and a dispatch's arguments and results."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.attention import LayerCache, PageTable, init_cache
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Context, Drafter, Target
from jaxspec.drafters.checks import checked_caches
from jaxspec.sampling import SamplingState
from jaxspec.sharding import replicated

MAX_STOP_TOKENS = 16
"""The most stop tokens of a request, the model's own end-of-sequence tokens included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """The state of all slots; donated to each program and returned by it.

    Attributes:
      target_cache, draft_cache: each layer's pages (see `LayerCache`).
      history: i32[B, X], every slot's tokens by position; entries past `length` are stale. X is
        max_model_len + 1.
      length: i32[B], the number of tokens with cached keys and values. It is also the position of the last
        token, whose keys and values are not cached yet.
      hidden: [B, M'], the state that the drafter drafts from, in the engine's dtype.
      remaining: i32[B], tokens that a slot may still emit.
      active: bool[B], slots that are running; the others are computed, and their results dropped.
    """

    target_cache: tuple[LayerCache, ...]
    draft_cache: tuple[LayerCache, ...]
    history: jax.Array
    length: jax.Array
    hidden: jax.Array
    remaining: jax.Array
    active: jax.Array

    def gather(self, batch: "Batch") -> "EngineState":
        """The state of the b slots that a dispatch serves; those that do not decode yet are not active."""
        take = partial(jnp.take, indices=batch.slot, axis=0, mode="clip")
        taken: dict[str, Any] = {name: take(getattr(self, name)) for name in PER_SLOT}
        return replace(self, **taken | {"active": taken["active"] & batch.is_decoding})

    def scatter(self, batch: "Batch", state: "EngineState") -> "EngineState":
        """This state with the b slots of `state`, which `gather` returned, written back."""
        put: dict[str, Any] = {
            # Unused entries name a slot past the end, which is dropped.
            name: put_rows(getattr(self, name), batch.slot, getattr(state, name))
            for name in PER_SLOT
        }
        return replace(state, **put)

    def context(self, batch: "Batch") -> Context:
        """What the drafter sees of this state, which `gather` has cut to the b slots of the batch."""
        return Context(self.hidden, self.history, self.length, self.active, batch.page_table, batch.sampling)


def put_rows(into: jax.Array, index: Any, rows: jax.Array) -> jax.Array:
    """`into.at[index].set(rows)` without what is out of range: indices past the end, and below 0.

    NumPy's meaning of an index below 0 would take seven more operations for each.
    """
    return into.at[index].set(rows, mode="drop", wrap_negative_indices=False)


PER_SLOT = ("history", "length", "hidden", "remaining", "active")
"""The fields of `EngineState` with a leading axis of slots."""


def init_state(target: Target, drafter: Drafter, config: ResolvedEngineConfig, *, mesh: Mesh) -> EngineState:
    """A state without requests, its caches split over `mesh` and the rest whole on every device."""
    batch_size, page_size, dtype = config.batch_size, config.page_size, jnp.dtype(config.dtype)
    # One more for page 0, which the configuration does not count.
    cache = partial(
        init_cache,
        num_pages=config.num_pages + 1,
        page_size=page_size,
        dtype=dtype,
        pair_dtype=jnp.dtype(config.cache_dtype),
        mesh=mesh,
    )

    def idle_slots() -> EngineState:
        return EngineState(
            target_cache=(),
            draft_cache=(),
            history=jnp.zeros((batch_size, config.max_model_len + 1), jnp.int32),
            length=jnp.zeros(batch_size, jnp.int32),
            hidden=jnp.zeros((batch_size, drafter.hidden_size), dtype),
            remaining=jnp.zeros(batch_size, jnp.int32),
            active=jnp.zeros(batch_size, bool),
        )

    return replace(
        # One small program to compile instead of one for every array.
        jax.jit(idle_slots, out_shardings=replicated(mesh))(),
        target_cache=cache(target.cache_shapes),
        draft_cache=cache(checked_caches(drafter), is_split=drafter.is_split),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The b slots that a dispatch serves, and the parameters of their requests.

    Attributes:
      slot: i32[b], index of the slot; past the last slot for an unused entry.
      is_decoding: bool[b], whether the slot decodes in the first step; False if its prompt is read, and for
        an unused entry.
      limit: i32[b], the most drafts that may be accepted; further ones count as not drawn.
      steps: i32[b], the steps to run, the same for every slot; unused entries have a large number.
      page_table: of shape [b, T].
      stop_tokens: i32[b, MAX_STOP_TOKENS], padded with -1.
      sampling: each slot's sampling parameters.
    """

    slot: jax.Array
    is_decoding: jax.Array
    limit: jax.Array
    steps: jax.Array
    page_table: PageTable
    stop_tokens: jax.Array
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """G chunks of prompts that one step reads; several may be consecutive chunks of one prompt.

    Attributes:
      batch_index: i32[G], index among the b slots of the batch; past the last one for an unused chunk.
      tokens: i32[G, C].
      next_tokens: i32[G, C], the token after each in the prompt; ignored for the prompt's last token.
      start: i32[G], position of the first token.
      count: i32[G], tokens in the chunk; the rest of C is padding.
      is_last: bool[G], whether the chunk ends the prompt.
      given_token: i32[G], the token after the prompt if it is given; -1 if it is to be sampled.
      remaining: i32[G], tokens that the request may still emit, the token after the prompt included.
    """

    batch_index: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    given_token: jax.Array
    remaining: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FirstTokens:
    """The token after each chunk; it counts only for chunks that end a prompt.

    Attributes:
      token: i32[G].
      done: bool[G], whether the request ends with this token.
      failed: bool[G], whether it ends because the logits of the token are not finite.
    """

    token: jax.Array
    done: jax.Array
    failed: jax.Array

    @classmethod
    def none(cls, num_chunks: int) -> "FirstTokens":
        """Those of chunks none of which ends a prompt."""
        return cls(jnp.zeros(num_chunks, jnp.int32), jnp.zeros(num_chunks, bool), jnp.zeros(num_chunks, bool))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What the b slots emitted in one step.

    Attributes:
      tokens: i32[b, K+1].
      num_tokens: i32[b], how many of them are emitted; 0 for a slot that is not active.
      drafted: i32[b], drafts that were verified.
      accepted: i32[b], how many of them the target accepted, including any that a stop cut off.
      done: bool[b], whether the slot's request ended in this step.
      failed: bool[b], whether it ended because the logits after the last emitted token are not finite.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    done: jax.Array
    failed: jax.Array

    @classmethod
    def none(cls, steps: int, slots: int, drafts: int) -> "Emitted":
        """What so many steps emit if no slot is active, with a leading axis of steps."""
        counts = jnp.zeros((steps, slots), jnp.int32)
        tokens, ends = jnp.zeros((steps, slots, drafts + 1), jnp.int32), jnp.zeros((steps, slots), bool)
        return cls(tokens, counts, counts, counts, ends, ends)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """The results of a step or of a dispatch.

    Attributes:
      emitted: those of decoding slots, for a dispatch with a leading axis of steps; None if no slot decodes.
      first: those of prompts; None if none are read.
    """

    emitted: Emitted | None
    first: FirstTokens | None
