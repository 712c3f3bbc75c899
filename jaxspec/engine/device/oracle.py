"""A step driven from Python, each phase a program of its own, and so is each draft of a draft loop.

Compiled programs are compared with it, and `jaxspec.inspect_steps` looks between the phases.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxspec_kernels.op import exact

from jaxspec.attention import LayerCache
from jaxspec.drafters.autoregressive import AutoregressiveDrafter, DraftState
from jaxspec.drafters.base import Context, Proposal
from jaxspec.engine.device.outcome import Outcome, PackedOutcomes, pack_outcomes
from jaxspec.engine.device.plan import Plan, Size
from jaxspec.engine.device.programs import Programs, Words
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import PHASES, Carry, Models, Phase, draft, with_drafts
from jaxspec.sampling import ConstrainedRows

Watch = Callable[[str, Callable[[], Carry]], Carry]
"""Runs a phase: called with its name and a function that runs it, and returns what that returned."""


class Oracle:
    """The phases of a step as programs, for one engine's weights on one device."""

    def __init__(self, programs: Programs):
        self._merge, self._leaves = programs.lowering.merge, programs.leaves
        self._is_exact = programs.config.exact
        self._options = programs.lowering.options_of_phases
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.models = self._merge(self._leaves)

    def renew(self) -> None:
        """Takes over the engine's weights, which may have been replaced."""
        self.models = self._merge(self._leaves)

    def step(self, plan: Plan, state: EngineState, watch: Watch = lambda phase, run: run()) -> Carry:
        """`engine_step`, phase by phase; donates the state."""
        carry = Carry(state, Proposal.none(len(state.length)))
        for phase in PHASES:
            carry = watch(phase.__name__, partial(self._run_phase, phase, plan, carry))
        return carry

    def take_over(self, programs: Programs) -> None:
        """Runs the steps of all later dispatches that decode."""
        programs.enqueue = partial(self._run, programs, programs.enqueue)  # type: ignore

    def call(self, function: Callable[..., Any], *arguments: Any, donated: Any = ()) -> Any:
        """function(models, donated, *arguments) as a program that donates `donated`."""
        if function not in self._compiled:

            def program(leaves: Any, donated: Any, *arguments: Any) -> Any:
                with exact(self._is_exact):
                    return function(self._merge(leaves), donated, *arguments)

            self._compiled[function] = jax.jit(program, donate_argnums=1, compiler_options=self._options)
        return self._compiled[function](self._leaves, donated, *arguments)

    def _run(
        self,
        programs: Programs,
        compiled: Callable[..., tuple[EngineState, PackedOutcomes]],
        state: EngineState,
        words: Words,
        *,
        size: Size,
    ) -> tuple[EngineState, PackedOutcomes]:
        if not size.width:
            return compiled(state, words, size=size)
        config = programs.config
        plan = Plan.unpack(jnp.asarray(words), size, config, programs.grammars(size))
        of_slots, of_chunks = [], Outcome.none(0, 0, 1)
        all_slots, state = state, state.gather(plan)
        for _ in range(min(config.steps_per_dispatch, int(plan.steps.min()))):
            carry = self.step(plan, state)
            state = carry.state
            of_slots.append(carry.outcomes[0])
            if plan.size.chunks:
                of_chunks, plan = jax.tree.map(lambda x: x[None], carry.outcomes[1]), plan.without_chunks()
        decoded = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *of_slots)
        return all_slots.scatter(plan, state), pack_outcomes((decoded, of_chunks))

    def _run_phase(self, phase: Phase, plan: Plan, carry: Carry) -> Carry:
        drafter = self.models.drafter
        if phase is draft and plan.size.drafts and isinstance(drafter, AutoregressiveDrafter):
            return self._draft(drafter, plan, carry)
        rest = replace(carry, state=())  # type: ignore[arg-type]
        return self.call(_RUN[phase], plan, rest, donated=carry.state)

    def _draft(self, drafter: AutoregressiveDrafter, plan: Plan, carry: Carry) -> Carry:
        """`draft`, with a program for each draft."""
        context = carry.state.context(plan, drafter.needs.target_caches)
        state = self.call(_start, plan, context, donated=carry.state.draft_cache)
        # It holds arrays of the context, which are not to be donated.
        constrained, state = state.constrained, replace(state, constrained=None)
        for i in range(1, plan.size.drafts):
            state = self.call(_step, context, constrained, jnp.int32(i), donated=state)
        return with_drafts(self.models, plan, carry, drafter.finish(context, state))


def _phase(phase: Phase) -> Callable[..., Carry]:
    return lambda models, state, plan, rest: phase(models, plan, replace(rest, state=state))


_RUN = {phase: _phase(phase) for phase in PHASES}


def _start(models: Models, cache: tuple[LayerCache, ...], plan: Plan, context: Context) -> DraftState:
    size, drafter = plan.size, cast(AutoregressiveDrafter, models.drafter)
    return drafter.start(models.target, context, cache, num_drafts=size.drafts, mode=size.mode)


def _step(
    models: Models, state: DraftState, context: Context, constrained: ConstrainedRows | None, i: jax.Array
) -> DraftState:
    drafter, state = cast(AutoregressiveDrafter, models.drafter), replace(state, constrained=constrained)
    return replace(drafter.step(models.target, context, state, i), constrained=None)
