"""Rounds of dispatches, with the device always one round ahead of the host."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.errors import EngineError
from jaxspec.engine.packing import pack_prefill
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Chunk, Plan, Running, Scheduler, SlotStep
from jaxspec.engine.state import EngineState, PrefillBatch, PrefillOutput, StepOutput, init_state
from jaxspec.engine.step import Models, StepSettings
from jaxspec.sampling import SamplingMode, required_mode
from jaxspec.sharding import replicated

MAX_FAILURES = 2
"""Rounds in a row that may fail before the engine gives up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A round of dispatches whose results the host has not read."""

    plan: Plan
    prefills: list[PrefillOutput]
    decode: StepOutput | None


class EngineCore:
    """What one thread owns: the device's state, the programs, the scheduler.

    Attributes:
      modes: the sampling modes that have a decode program.
      error: why it takes no requests any more; None while it does.
      when_idle: called once, as soon as there is nothing to do.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: ResolvedEngineConfig,
        *,
        mesh: Mesh,
        modes: tuple[SamplingMode, ...],
        progress: bool,
    ):
        self.config, self.modes = config, modes
        self.error: EngineError | None = None
        self.when_idle: list[Callable[[], object]] = []
        self.scheduler = Scheduler(
            batch_size=config.batch_size,
            pages=PageAllocator(config.num_pages, config.page_size),
            prefill_rows=config.prefill_rows,
            prefill_chunk=config.prefill_chunk,
            steps_per_dispatch=config.steps_per_dispatch,
        )
        self._whole = replicated(mesh)
        self._in_flight: deque[InFlight] = deque()
        self._num_failures = 0
        self._make_state: Callable[[], EngineState] = partial(init_state, target, drafter, config, mesh=mesh)
        self.state = self._make_state()
        settings = StepSettings(
            steps_per_dispatch=config.steps_per_dispatch,
            synthetic_acceptance_length=config.synthetic_acceptance_length,
        )
        self.programs = Programs(Models(target, drafter), settings, draft_loop=config.draft_loop, mesh=mesh)
        self._live_host = list(self.scheduler.live)
        self._live = jax.device_put(np.asarray(self._live_host), self._whole)
        self.programs.compile(self.state, self._pack([]), self._live, modes=modes, progress=progress)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or results are to be read."""
        return bool(self.scheduler) or bool(self._in_flight)

    def add(self, requests: Sequence[Request]) -> None:
        """Queues requests."""
        for request in requests:
            if self.error is not None:
                request.end("failed", str(self.error))
            elif request.finish_reason is None:
                request.arrived_at = time.perf_counter()
                self.scheduler.add(request)

    def abort(self, requests: Sequence[Request], why: str) -> None:
        """Ends requests wherever they are; those that have ended stay as they are."""
        for request in requests:
            self.scheduler.abort(request, why)

    def close(self, why: str, *, reason: Literal["aborted", "failed"] = "aborted") -> None:
        """Ends every request, takes no more, and gives up the cache."""
        self.error = EngineError(why)
        self.scheduler.restart()
        for request in self.scheduler.waiting:
            request.end(reason, why)
        self.scheduler.waiting.clear()
        self._in_flight.clear()
        if hasattr(self, "state"):
            del self.state

    def step(self) -> None:
        """Plans and enqueues the next round, then reads the one before it.

        A round that fails costs the device's state and no request: a new state is made, and what was running
        is read again, prompt and answer so far, and goes on with the same tokens.
        """
        try:
            self._round()
        except BaseException as error:  # no interrupt reaches this thread; whatever this is, clients wait
            self._start_afresh(error)

    def _round(self) -> None:
        self.scheduler.expire(time.monotonic())
        plan = self.scheduler.plan()
        if plan:
            self._in_flight.append(self._dispatch(plan))
        if self._in_flight and (len(self._in_flight) > 1 or not plan):
            # Taken off the queue when it is committed and not before, so that nothing can lose it.
            self._commit(self._in_flight[0])
            self._in_flight.popleft()
            self._num_failures = 0

    def _start_afresh(self, error: BaseException) -> None:
        # The frames hold the old state, whose memory the new one needs.
        traceback.clear_frames(error.__traceback__)
        self._num_failures += 1
        self._in_flight.clear()
        del self.state
        self.scheduler.restart()
        if self._num_failures <= MAX_FAILURES:
            _log.warning("a dispatch failed; its requests are read again: %s", _one_line(error))
            try:
                self.state = self._make_state()
                return
            except BaseException as last:
                error = last
        self.close(f"the device failed: {_one_line(error)}", reason="failed")

    def _dispatch(self, plan: Plan) -> InFlight:
        prefills = []
        for chunks in plan.prefills:
            self.state, first = self.programs.prefill(self.state, self._pack(chunks))
            prefills.append(first)
        output = None
        if plan.decodes:
            mode = self._mode_for(plan.decodes)
            self.state, output = self.programs.decode(self.state, self._live_mask(), mode=mode)
        for array in jax.tree.leaves((prefills, output)):
            array.copy_to_host_async()
        return InFlight(plan, prefills, output)

    def _commit(self, in_flight: InFlight) -> None:
        # All is read before anything is committed.
        firsts = [
            [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(first)] for first in in_flight.prefills
        ]
        steps = [] if in_flight.decode is None else _steps(in_flight.decode)
        for chunks, (tokens, done, failed) in zip(in_flight.plan.prefills, firsts, strict=True):
            for row, chunk in enumerate(chunks):
                if chunk.is_last:
                    self.scheduler.commit_first(chunk, tokens[row], done=done[row], failed=failed[row])
        for running in in_flight.plan.decodes:
            self.scheduler.commit_decode(running, [step[running.slot] for step in steps])

    def _mode_for(self, decodes: Sequence[Running]) -> SamplingMode:
        """The least mode that was compiled and serves all of these."""
        required = max(required_mode(running.request.params) for running in decodes)
        return min(mode for mode in self.modes if mode >= required)

    def _live_mask(self) -> jax.Array:
        if self._live_host != self.scheduler.live:
            self._live_host = list(self.scheduler.live)
            self._live = jax.device_put(np.asarray(self._live_host), self._whole)
        return self._live

    def _pack(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        return pack_prefill(
            chunks,
            self.state,
            rows=self.config.prefill_rows,
            width=self.config.prefill_chunk,
            whole=self._whole,
        )


def _one_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _steps(output: StepOutput) -> list[list[SlotStep]]:
    """What every step of a dispatch did for every slot, as Python's numbers: arrays cost more to index."""
    tokens, num_tokens, *rest = (np.asarray(leaf).tolist() for leaf in jax.tree.leaves(output))
    return [
        [SlotStep(row[:count], *what) for row, count, *what in zip(*step, strict=True)]
        for step in zip(tokens, num_tokens, *rest, strict=True)
    ]
