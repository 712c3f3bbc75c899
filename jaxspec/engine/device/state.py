"""The state that stays on the device between dispatches."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.attention import LayerCache, NumStates, init_cache
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Context, Drafter, Target
from jaxspec.drafters.checks import checked_caches
from jaxspec.engine.device.plan import Plan
from jaxspec.sampling import Constrained, Constraints
from jaxspec.sharding import replicated


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
      unapplied: one i32[B], how many drafts of the last step were accepted and are not in the states of
        recurrent layers yet; empty for a target without such layers, whose programs so do not carry it.
      automaton: i32[B], the states of the slots' grammars after their last tokens; stale for a request
        without a grammar. Only programs with grammars read or write it.
    """

    target_cache: tuple[LayerCache, ...]
    draft_cache: tuple[LayerCache, ...]
    history: jax.Array
    length: jax.Array
    hidden: jax.Array
    remaining: jax.Array
    active: jax.Array
    unapplied: tuple[jax.Array, ...]
    automaton: jax.Array

    def gather(self, plan: Plan) -> "EngineState":
        """The state of the b slots that a dispatch serves; those that do not decode yet are not active."""
        take = partial(jnp.take, indices=plan.slot, axis=0, mode="clip")
        taken: dict[str, Any] = {name: jax.tree.map(take, getattr(self, name)) for name in per_slot(plan)}
        return replace(self, **taken | {"active": taken["active"] & plan.is_decoding})

    def scatter(self, plan: Plan, state: "EngineState") -> "EngineState":
        """This state with the b slots of `state`, which `gather` returned, written back."""
        put: dict[str, Any] = {
            # Unused entries name a slot past the end, which is dropped.
            name: jax.tree.map(
                lambda into, rows: put_rows(into, plan.slot, rows), getattr(self, name), getattr(state, name)
            )
            for name in per_slot(plan)
        }
        return replace(state, **put)

    def context(self, plan: Plan, target_caches: tuple[int, ...] = ()) -> Context:
        """What the drafter sees of this state, which `gather` has cut to the b slots of the plan.

        Args:
          target_caches: see `Needs`.
        """
        constrained = Constrained(
            plan.constraints,
            plan.stop_tokens,
            self.history,
            self.length,
            # A slot may have the state that a grammar left there before.
            jnp.where(plan.constraints.grammar[:, 0] > 0, self.automaton, 0)
            if plan.size.constraints & Constraints.GRAMMAR
            else self.automaton[:0],
            plan.grammars,
        )
        return Context(
            self.hidden,
            self.history,
            self.length,
            self.active,
            plan.page_table,
            plan.sampling,
            constrained if plan.size.constraints else Constrained.none(len(self.length)),
            tuple(self.target_cache[layer] for layer in target_caches),
        )


def put_rows(into: jax.Array, index: Any, rows: jax.Array) -> jax.Array:
    """`into.at[index].set(rows)` without what is out of range: indices past the end, and below 0.

    NumPy's meaning of an index below 0 would take seven more operations for each.
    """
    return into.at[index].set(rows, mode="drop", wrap_negative_indices=False)


PER_SLOT = ("history", "length", "hidden", "remaining", "active", "unapplied")
"""The fields of `EngineState` with a leading axis of slots, except `automaton`."""


def per_slot(plan: Plan) -> tuple[str, ...]:
    """The fields with a leading axis of slots that a program reads and writes."""
    return (*PER_SLOT, "automaton") if plan.size.constraints & Constraints.GRAMMAR else PER_SLOT


def init_state(target: Target, drafter: Drafter, config: ResolvedEngineConfig, *, mesh: Mesh) -> EngineState:
    """A state without requests, its caches split over `mesh` and the rest whole on every device."""
    batch_size, page_size, dtype = config.batch_size, config.page_size, jnp.dtype(config.dtype)
    num_states = NumStates(batch_size, config.state_copies, drafter.num_speculative_tokens)
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
            hidden=jnp.zeros((batch_size, drafter.needs.state_size), dtype),
            remaining=jnp.zeros(batch_size, jnp.int32),
            active=jnp.zeros(batch_size, bool),
            unapplied=(jnp.zeros(batch_size, jnp.int32),) if config.has_states else (),
            automaton=jnp.zeros(batch_size, jnp.int32),
        )

    return replace(
        # One small program to compile instead of one for every array.
        jax.jit(idle_slots, out_shardings=replicated(mesh))(),
        target_cache=cache(target.cache_shapes, num_states=num_states),
        draft_cache=cache(checked_caches(drafter), is_split=drafter.needs.is_split),
    )
