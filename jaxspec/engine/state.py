"""What lives on the device between dispatches, and what comes back from one."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.attention import LayerCache, PageTable, init_cache
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Context, Drafter, Target
from jaxspec.sampling import SamplingState
from jaxspec.sharding import replicated

MAX_STOP_TOKENS = 16
"""Stop tokens that one request may have, the model's own end-of-sequence tokens included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """What the compiled programs carry; donated into each of them and returned by it.

    Attributes:
      target_cache, draft_cache: the layers' pages.
      history: i32[B, X], every slot's tokens by position; what lies past `length` is stale.
      length: i32[B], committed tokens, and the position of the last token, whose KV is not cached yet.
      hidden: [B, M'], what the drafter drafts from.
      remaining: i32[B], tokens that a slot may still emit.
      active: bool[B], slots that are running; the others are computed and ignored.
    """

    target_cache: tuple[LayerCache, ...]
    draft_cache: tuple[LayerCache, ...]
    history: jax.Array
    length: jax.Array
    hidden: jax.Array
    remaining: jax.Array
    active: jax.Array

    def take(self, served: "Served") -> "EngineState":
        """The same for b of the slots; a slot that does not go on is not active."""
        take = partial(jnp.take, indices=served.slot, axis=0, mode="clip")
        taken: dict[str, Any] = {name: take(getattr(self, name)) for name in PER_SLOT}
        return replace(self, **taken | {"active": taken["active"] & served.goes_on})

    def put(self, served: "Served", state: "EngineState") -> "EngineState":
        """This state with the slots of `state`, which was taken from it."""
        put: dict[str, Any] = {
            # Places without work name a slot past the end: dropped. (-1 would write the last slot.)
            name: getattr(self, name).at[served.slot].set(getattr(state, name), mode="drop")
            for name in PER_SLOT
        }
        return replace(state, **put)

    def context(self, served: "Served") -> Context:
        """What the drafter sees of b slots."""
        return Context(
            self.hidden, self.history, self.length, self.active, served.page_table, served.sampling
        )


PER_SLOT = ("history", "length", "hidden", "remaining", "active")
"""The fields of `EngineState` that have a row for every slot."""


def init_state(target: Target, drafter: Drafter, config: ResolvedEngineConfig, *, mesh: Mesh) -> EngineState:
    """An idle state, its caches split over `mesh`."""
    batch_size, page_size, dtype = config.batch_size, config.page_size, jnp.dtype(config.dtype)
    # One page more than the configuration's, page 0.
    cache = partial(init_cache, num_pages=config.num_pages + 1, page_size=page_size, dtype=dtype, mesh=mesh)

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
        draft_cache=cache(drafter.cache_shapes, is_split=drafter.is_split),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Served:
    """The b slots that a dispatch serves, and what their requests ask for.

    Attributes:
      slot: i32[b]; past the end for a place without work.
      goes_on: bool[b], the slot decodes what an earlier dispatch left; False while its prompt is read, and
        for a place without work.
      limit: i32[b], the drafts that may be accepted; those past it are as if they had not been drawn.
      page_table: of [b, T].
      stop_tokens: i32[b, MAX_STOP_TOKENS], padded with -1.
      sampling: of each.
    """

    slot: jax.Array
    goes_on: jax.Array
    limit: jax.Array
    page_table: PageTable
    stop_tokens: jax.Array
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """G pieces of prompts that one step reads; several may be consecutive pieces of one prompt.

    Attributes:
      place: i32[G], which of the b served slots; past the end for a piece without work.
      tokens: i32[G, C].
      next_tokens: i32[G, C], the prompt's token after each; ignored at the prompt's last one.
      start: i32[G], position of the first token.
      count: i32[G], tokens in the piece.
      is_last: bool[G], the piece ends the prompt.
      known: i32[G], the token after the last one where it is not to be sampled; -1 elsewhere.
      remaining: i32[G], tokens that the request may emit, a known one included.
    """

    place: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    known: jax.Array
    remaining: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FirstTokens:
    """The first token of every prompt that a piece ended.

    Attributes:
      token: i32[G].
      done: bool[G], the request ends with it.
      failed: bool[G], for the logits that it was sampled from are not finite.
    """

    token: jax.Array
    done: jax.Array
    failed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What the b slots emitted in one step.

    Attributes:
      tokens: i32[b, K+1].
      num_tokens: i32[b], how many of them stand; 0 for a slot that did not run.
      drafted: i32[b], drafts that were verified.
      accepted: i32[b], how many of them the target accepted, whether or not a stop cut them off.
      done: bool[b], the slot's request ended in this step.
      failed: bool[b], it ended because the logits after the last emitted token are not finite.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    done: jax.Array
    failed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What came out of a step, or of a dispatch.

    Attributes:
      emitted: by the slots that decode, of a dispatch with a leading axis of steps; None where none does.
      first: of the prompts; None where none is read.
    """

    emitted: Emitted | None
    first: FirstTokens | None
