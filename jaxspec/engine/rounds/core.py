"""Runs rounds of dispatches, with the device always one round ahead of the host."""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.device.outcome import PackedOutcomes, read_outcomes, results
from jaxspec.engine.device.plan import Size, empty_plan, pack
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.device.state import EngineState, init_state
from jaxspec.engine.device.step import Models
from jaxspec.engine.errors import EngineError
from jaxspec.engine.host.counters import Counters
from jaxspec.engine.host.grammars import GrammarStore
from jaxspec.engine.host.metrics import Totals
from jaxspec.engine.host.pages import PagePool
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Dispatch, Scheduler
from jaxspec.engine.host.scoring import Scoring
from jaxspec.engine.rounds.adaptive_k import AdaptiveK, times_file
from jaxspec.engine.rounds.preparation import Preparation
from jaxspec.engine.rounds.weights import WeightUpdate
from jaxspec.files import CheckpointError
from jaxspec.jax_settings import platform
from jaxspec.sampling import SamplingMode, TokenLogprobs
from jaxspec.sharding import replicated
from jaxspec.weights.array_weights import overwrite

MAX_FAILURES = 2
"""Consecutive rounds that may fail before the engine gives up."""

_log = logging.getLogger(__name__)


class EngineCore:
    """The device's state, the programs and the scheduler, all owned by the engine's thread.

    Attributes:
      state: donated to each dispatch and replaced by its result; absent once the engine is closed.
      device: the first device.
      totals: of the requests that have ended.
      preparation: decides which programs there are, and which serve a dispatch.
      grammars: the automata of grammars.
      target, drafter: the networks, with their weights; absent once the engine is closed.
      weights_lock: held while weights are replaced, and while another thread reads them.
      updating: held by a client that looks at weights until new ones, which may be made of these, are in
        place.
      error: why no more requests are accepted; None while they are.
      when_idle: functions to call once, as soon as there is nothing to do.
      when_closed: functions to call once it is closed.
      when_prepared: functions to call once, as soon as `prepare_programs` has nothing to do either, and no
        program is left to compile.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: ResolvedEngineConfig,
        *,
        mesh: Mesh,
        modes: tuple[SamplingMode, ...],
        is_adaptive: bool,
        progress: bool,
        grammars: GrammarStore,
    ):
        self.config = config
        self.device: jax.Device = mesh.devices.flat[0]
        self.counters = Counters()
        self.totals = Totals()
        self.error: EngineError | None = None
        self.target, self.drafter, self.grammars = target, drafter, grammars
        self.weights_lock = threading.Lock()
        self.updating = threading.RLock()
        self._updates: deque[WeightUpdate] = deque()
        self.when_idle: list[Callable[[], object]] = []
        self.when_closed: list[Callable[[], object]] = []
        self.when_prepared: list[Callable[[], object]] = []
        self.scheduler = Scheduler(
            batch_size=config.batch_size,
            pages=PagePool(
                config.num_pages, config.page_size, config.state_copies if config.has_states else None
            ),
            steps=config.steps_per_dispatch,
            adapts_steps=config.adapts_steps,
            tokens_per_step=drafter.num_speculative_tokens + 1,
            chunk_size=config.prefill_chunk,
            max_chunks=config.prefill_batch_size,
            # As many are read between dispatches until a mixed program is compiled.
            chunks_between=max(config.mixed_prefill_tokens // config.prefill_chunk, 8),
            prefix_caching=config.prefix_caching,
            hold_grammar=grammars.hold,
            drafter_has_rows=bool(drafter.cache_shapes or drafter.needs.state_size),
        )
        self._reads_history = drafter.needs.history
        self.adaptive_k: AdaptiveK | None = None
        self._replicated = replicated(mesh)
        self._in_flight: deque[tuple[Dispatch, PackedOutcomes, Size, bool]] = deque()
        self._num_failures = 0
        self._make_state: Callable[[], EngineState] = partial(init_state, target, drafter, config, mesh=mesh)
        self.state = self._make_state()
        self.programs = Programs(
            Models(target, drafter), config, state=self.state, mesh=mesh, slab=lambda: grammars.slab
        )
        self.preparation = Preparation(
            self.programs,
            config,
            grammars,
            modes=modes,
            drafts=drafter.num_speculative_tokens,
            is_adaptive=is_adaptive,
            reads_history=self._reads_history,
        )
        if is_adaptive:
            self.adaptive_k = AdaptiveK(
                self.programs,
                self.scheduler,
                config,
                drafts=drafter.num_speculative_tokens,
                need_for=self.preparation.need,
                run_alone=self._run_alone,
                times_file=times_file(target, drafter, config, self.programs.leaves),
            )
            self.scheduler.choose = self.adaptive_k.choose
        first, later = self.preparation.sizes
        self.programs.compile(first, progress=progress)
        self._warm: set[Size] = set()
        while self._warm_one():
            pass
        self.programs.compile_in_background(later)

    @property
    def has_work(self) -> bool:
        """Whether a request or an update of weights waits, one runs, or results are still to be read."""
        return bool(self.scheduler) or bool(self._in_flight) or bool(self._updates)

    def add(self, requests: Sequence[Request]) -> None:
        """Queues requests; if the engine has failed or is closed, they fail at once."""
        for request in requests:
            request.when_ended = self.totals.add
            if self.error is not None:
                request.end("failed", str(self.error))
            elif request.finish_reason is not None:
                self.totals.add(request)  # it was aborted before it was queued
                request.deliver()
            else:
                request.arrived_at = time.perf_counter()
                self.scheduler.add(request)

    def abort(self, requests: Sequence[Request], why: str) -> None:
        """Ends queued and running requests; ignores those that have ended."""
        for request in requests:
            self.scheduler.abort(request, why)

    def update(self, update: WeightUpdate) -> None:
        """Queues new weights. Until they are in place, requests that have not begun wait."""
        if self.error is not None:
            update.done.set_exception(self.error)
            return
        self._updates.append(update)
        self.scheduler.is_held = True
        if update.in_flight == "abort":
            self.abort(self.scheduler.begun(), "the weights were replaced")

    def withdraw(self, update: WeightUpdate) -> None:
        """Drops new weights that are not in place yet, as nobody waits for them any more."""
        if update in self._updates:
            self._updates.remove(update)
            update.done.set_exception(EngineError("the update was interrupted"))
            self.scheduler.is_held = bool(self._updates)

    def _update_weights(self) -> None:
        """Puts new weights in place, unless a request has begun with the old ones."""
        while self._updates and not self.scheduler.begun():
            while self._in_flight:  # of requests that have ended
                self._commit(*self._in_flight[0])
                self._in_flight.popleft()
            update = self._updates.popleft()
            try:
                with self.weights_lock:
                    replaced = overwrite(update.batches)
                    self.programs.replace_weights(replaced, Models(self.target, self.drafter))
            except BaseException as error:  # the client waits for it
                update.done.set_exception(error)
                if not isinstance(error, CheckpointError):  # some weights are new, some old, some gone
                    self.close(f"an update of its weights failed: {_one_line(error)}", reason="failed")
                continue
            self.scheduler.pages.clear()
            if self.adaptive_k is not None:
                self.adaptive_k.choice.forget_acceptance()
            self.scheduler.weights_version += 1
            update.done.set_result(self.scheduler.weights_version)
        self.scheduler.is_held = bool(self._updates)

    def close(self, why: str, *, reason: Literal["aborted", "failed"] = "aborted") -> None:
        """Ends every request, accepts no more, and frees the device's state and the weights."""
        self.error = EngineError(why)
        self.preparation.close(self.error)
        self.scheduler.restart()
        for request in self.scheduler.waiting:
            request.end(reason, why)
        self.scheduler.waiting.clear()
        self._in_flight.clear()
        while self._updates:
            self._updates.popleft().done.set_exception(self.error)
        self._drop_state()
        for holder in ("_make_state", "target", "drafter"):  # they hold the weights, too
            self.__dict__.pop(holder, None)
        self.programs.close()
        self.grammars.close()  # after the programs, which may be taking its shape
        while self.when_closed:
            self.when_closed.pop()()

    def step(self) -> None:
        """Plans and enqueues the next round, then reads the one before it.

        If a round fails, the device's state is lost but no request is: a new state is allocated, and each
        running request's prompt and answer so far are read again. Its answer goes on with the same tokens.
        """
        try:
            self._round()
        except BaseException as error:  # interrupts never reach this thread, and clients wait for an answer
            self._recover(error)

    def _round(self) -> None:
        self.scheduler.expire(time.monotonic())
        if self._updates:
            self._update_weights()
        self.scheduler.mixed_chunks = self.preparation.mixed_chunks(self.scheduler)
        plan = self.scheduler.plan(self.preparation.share_program)
        for dispatch in plan:
            output, size = self._enqueue(dispatch)
            # A dispatch that directly follows another takes from that one's end to its own end.
            is_timed = len(plan) == 1 and not dispatch.chunks and bool(self._in_flight)
            self._in_flight.append((dispatch, output, size, is_timed))
        # An empty plan means that everything to do is in flight: wait for the oldest dispatch.
        ahead = len(plan) if plan else len(self._in_flight) - 1
        while len(self._in_flight) > max(ahead, 0):
            # Removed only after its commit, so that an exception cannot lose it.
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
            self._num_failures = 0
        if self.adaptive_k is not None:
            self.adaptive_k.time_between_rounds()

    def _recover(self, error: BaseException) -> None:
        # The traceback's frames keep the old state alive, and the new one needs its memory.
        traceback.clear_frames(error.__traceback__)
        self._num_failures += 1
        self._in_flight.clear()
        self.grammars.lose()
        self._drop_state()
        self.scheduler.restart()
        if self._num_failures <= MAX_FAILURES:
            _log.warning("a dispatch failed; its requests are read again: %s", _one_line(error))
            try:
                self.state = self._make_state()
                return
            except BaseException as last:
                error = last
        self.close(f"the device failed: {_one_line(error)}", reason="failed")

    def _drop_state(self) -> None:
        # The attribute is missing if the engine is closed or failed to allocate a new state.
        self.__dict__.pop("state", None)

    def _enqueue(self, dispatch: Dispatch) -> tuple[PackedOutcomes, Size]:
        if dispatch.scores:
            told = cast(Scoring, dispatch.batch[0].request.scoring)
            need = Size(len(dispatch.batch), len(dispatch.chunks), scores=told.report, layers=told.layers)
        else:
            width = dispatch.drafts + 1 if dispatch.decodes else 0
            requests = [running.request for running in dispatch.batch]
            need = self.preparation.need(requests, len(dispatch.chunks), width)
        size = self.programs.best(need)
        assert size is not None, need
        if not dispatch.scores:
            self._put_found(dispatch)
        # A program takes NumPy's arrays faster than `device_put` does.
        words = pack(dispatch, size, self.config)
        self.state, output = self.programs.enqueue(self.state, words, size=size)
        for array in (output.words, *output.hidden):
            array.copy_to_host_async()
        self._count(dispatch, size)
        return output, size

    def _put_found(self, dispatch: Dispatch) -> None:
        """Puts the tokens of prompts that were found in the prefix cache into the slots' histories."""
        begin = [
            chunk
            for chunk in dispatch.chunks
            if chunk.is_first and chunk.start and self._reads_history_of(chunk.running.request)
        ]
        if begin:
            tokens = np.full(self.state.history.shape, -1, np.int32)
            for chunk in begin:
                tokens[chunk.running.slot, : chunk.start] = chunk.running.tokens[: chunk.start]
            self.state = self.programs.put_history(self.state, tokens)

    def _reads_history_of(self, request: Request) -> bool:
        return self._reads_history or request.asked.constraints.needs_history

    def _commit(self, dispatch: Dispatch, packed: PackedOutcomes, size: Size, is_timed: bool) -> None:
        # Read everything first: a dispatch is committed whole or not at all.
        if dispatch.scores:
            logprobs: TokenLogprobs = read_outcomes(packed)
            reported = [np.asarray(x) for x in (logprobs.chosen, logprobs.top_tokens, logprobs.top)]
            self.scheduler.commit_scores(dispatch, reported, list(map(np.asarray, packed.hidden)))
            return
        of_slots, of_chunks = read_outcomes(packed)
        counts = np.asarray(of_slots.num_tokens)
        self.counters.slot_steps_used += int(np.count_nonzero(counts))
        if self.adaptive_k is not None:
            # A dispatch whose slots have all ended may have left out its last steps.
            is_timed = is_timed and bool(counts[dispatch.steps - 1].any())
            self.adaptive_k.record(dispatch, of_slots, size if is_timed else None)
        self.scheduler.commit(dispatch, results(of_slots), results(of_chunks))

    def prepare_programs(self) -> bool:
        """Runs programs without requests, to warm them up or time them; False if there is nothing to do."""
        if self.error is not None:
            return False
        try:
            return self._warm_one() or (self.adaptive_k is not None and self.adaptive_k.time_programs())
        except BaseException as error:  # as in `step`
            self._recover(error)
            return False

    def _warm_one(self) -> bool:
        """Runs a program that has not run yet, without requests; False if all have."""
        cold = set(self.programs.compiled) - self._warm if _needs_warming() else None
        if not cold:
            return False
        size = min(cold, key=self.programs.lowering.rows)
        self._warm.add(size)
        self._run_alone(size, runs=2)
        return True

    def _run_alone(self, size: Size, runs: int = 4) -> float:
        """Runs a program without requests, with the device one run ahead of the host, as in rounds; returns
        the mean seconds from the end of a run to that of the next, but for the first two and the last."""
        words = jax.device_put(empty_plan(size, self.config), self._replicated)
        jax.block_until_ready((self.state.length, words))
        ends, before = [], None
        for _ in range(runs):
            self.state, output = self.programs.enqueue(self.state, words, size=size)
            jax.block_until_ready(before)
            ends.append(time.perf_counter())
            before = output
        jax.block_until_ready(before)
        return (ends[-1] - ends[1]) / max(runs - 2, 1)

    def _count(self, dispatch: Dispatch, size: Size) -> None:
        counters = self.counters
        counters.dispatches += 1
        counters.prompt_rows += size.chunks * self.config.prefill_chunk
        counters.prompt_rows_used += sum(chunk.count for chunk in dispatch.chunks)
        counters.cached_rows += sum(chunk.start for chunk in dispatch.chunks if chunk.is_first)
        if dispatch.decodes:
            counters.steps += dispatch.steps
            counters.slot_steps += dispatch.steps * size.slots
        else:
            counters.prompt_passes += 1


def _needs_warming() -> bool:
    """Whether a program's first two runs are slow: a GPU loads kernels, then records CUDA graphs."""
    return platform() == "gpu"


def _one_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
