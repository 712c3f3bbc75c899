"""What lives on the device between dispatches, and what comes back from one."""

from dataclasses import dataclass, replace
from functools import partial

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
    """Everything the compiled programs carry; donated into each of them and returned by it.

    Attributes:
      target_cache, draft_cache: the layers' pages.
      page_table: of [B, T].
      history: i32[B, X], every slot's tokens by position; what lies past `length` is stale.
      length: i32[B], committed tokens, and the position of the last token, whose KV is not cached yet.
      hidden: [B, M'], what the drafter drafts from.
      remaining: i32[B], tokens that a slot may still emit.
      active: bool[B], slots that are running; the others are computed and ignored.
      stop_tokens: i32[B, MAX_STOP_TOKENS], padded with -1.
      sampling: of each slot.
    """

    target_cache: tuple[LayerCache, ...]
    draft_cache: tuple[LayerCache, ...]
    page_table: PageTable
    history: jax.Array
    length: jax.Array
    hidden: jax.Array
    remaining: jax.Array
    active: jax.Array
    stop_tokens: jax.Array
    sampling: SamplingState

    @property
    def context(self) -> Context:
        """What the drafter sees of the state."""
        return Context(self.hidden, self.history, self.length, self.active, self.page_table, self.sampling)


def init_state(target: Target, drafter: Drafter, config: ResolvedEngineConfig, *, mesh: Mesh) -> EngineState:
    """An idle state, its caches split over `mesh`."""
    batch_size, page_size, dtype = config.batch_size, config.page_size, jnp.dtype(config.dtype)
    table_width = -(-config.max_model_len // page_size)
    # One page more than the configuration's, page 0.
    cache = partial(init_cache, num_pages=config.num_pages + 1, page_size=page_size, dtype=dtype, mesh=mesh)

    def idle_slots() -> EngineState:
        ints = jnp.zeros(batch_size, jnp.int32)
        return EngineState(
            target_cache=(),
            draft_cache=(),
            page_table=PageTable(jnp.zeros((batch_size, table_width), jnp.int32), page_size),
            history=jnp.zeros((batch_size, config.max_model_len + 1), jnp.int32),
            length=ints,
            hidden=jnp.zeros((batch_size, drafter.hidden_size), dtype),
            remaining=jnp.zeros_like(ints),
            active=jnp.zeros(batch_size, bool),
            stop_tokens=jnp.full((batch_size, MAX_STOP_TOKENS), -1, jnp.int32),
            sampling=SamplingState(
                temperature=jnp.zeros(batch_size, jnp.float32),
                top_k=jnp.zeros_like(ints),
                top_p=jnp.ones(batch_size, jnp.float32),
                min_p=jnp.zeros(batch_size, jnp.float32),
                seed=jnp.zeros((batch_size, 2), jnp.uint32),
            ),
        )

    return replace(
        # One small program to compile instead of one for every array.
        jax.jit(idle_slots, out_shardings=replicated(mesh))(),
        target_cache=cache(target.cache_shapes),
        draft_cache=cache(drafter.cache_shapes),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """A chunk of prompt for each of R slots, and the request that the slot now serves.

    Attributes:
      slot: i32[R]; B for a row without work.
      tokens: i32[R, C].
      next_tokens: i32[R, C], the prompt's token after each; ignored at the prompt's last one.
      start: i32[R], position of the first token.
      count: i32[R], tokens in the chunk.
      is_last: bool[R], the chunk ends the prompt.
      known: i32[R], the token after the last one where it is not to be sampled; -1 elsewhere.
      page_table: of [R, T], the slots' rows.
      remaining: i32[R], tokens that the request may emit, a known one included.
      stop_tokens: i32[R, MAX_STOP_TOKENS].
      sampling: of each request.
    """

    slot: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    known: jax.Array
    page_table: PageTable
    remaining: jax.Array
    stop_tokens: jax.Array
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillOutput:
    """The first token of every prompt that the chunk ended.

    Attributes:
      token: i32[R].
      done: bool[R], the request ends with it.
      failed: bool[R], for the logits that it was sampled from are not finite.
    """

    token: jax.Array
    done: jax.Array
    failed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What one engine step emitted; with a leading axis S for a dispatch of several.

    Attributes:
      tokens: i32[B, K+1].
      num_tokens: i32[B], how many of them stand; 0 for a slot that did not run.
      drafted: i32[B], drafts that were verified.
      accepted: i32[B], how many of them the target accepted, whether or not a stop cut them off.
      done: bool[B], the slot's request ended in this step.
      failed: bool[B], it ended because the logits after the last emitted token are not finite.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    done: jax.Array
    failed: jax.Array
