"""Rounds of dispatches, with the device always one round ahead of the host."""

import logging
import os
import platform
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.choice import ALONE, DraftChoice, Key, Slot, StepTimes
from jaxspec.engine.compilation_cache import compilation_cache
from jaxspec.engine.counters import Counters
from jaxspec.engine.errors import EngineError
from jaxspec.engine.packing import empty_pieces, empty_served, pack_pieces, pack_served
from jaxspec.engine.pages import PagePool
from jaxspec.engine.programs import Programs, Size
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Choice, Dispatch, FirstToken, Running, Scheduler, SlotStep
from jaxspec.engine.state import Emitted, EngineState, StepOutput, init_state
from jaxspec.engine.step import Models, StepSettings
from jaxspec.sampling import SamplingMode, required_mode
from jaxspec.sharding import replicated

MAX_FAILURES = 2
"""Rounds in a row that may fail before the engine gives up."""

_log = logging.getLogger(__name__)


class EngineCore:
    """What one thread owns: the device's state, the programs, the scheduler.

    Attributes:
      modes: the sampling modes that have a decode program.
      later_sizes: the programs that are compiled behind its back.
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
        is_auto: bool,
        progress: bool,
    ):
        self.config, self.modes = config, modes
        self.counters = Counters()
        self.error: EngineError | None = None
        self.when_idle: list[Callable[[], object]] = []
        self.scheduler = Scheduler(
            batch_size=config.batch_size,
            pages=PagePool(config.num_pages, config.page_size),
            steps=config.steps_per_dispatch,
            tokens_per_step=drafter.num_speculative_tokens + 1,
            chunk=config.prefill_chunk,
            most_chunks=config.prefill_rows,
            prefix_caching=config.prefix_caching,
            drafter_has_rows=bool(drafter.cache_shapes or drafter.hidden_size),
        )
        self._most_drafts = drafter.num_speculative_tokens
        self.choice: DraftChoice | None = None
        self._times_file: Path | None = None
        self._read_at: float | None = None
        self._round_number = 0
        self._asked: dict[int, Size] = {}
        self._alone: dict[Key, list[float]] = {}
        self._whole = replicated(mesh)
        self._in_flight: deque[tuple[Dispatch, StepOutput, Size | None]] = deque()
        self._num_failures = 0
        self._table_width = -(-config.max_model_len // config.page_size)
        self._make_state: Callable[[], EngineState] = partial(init_state, target, drafter, config, mesh=mesh)
        self.state = self._make_state()
        settings = StepSettings(
            page_size=config.page_size,
            steps_per_dispatch=config.steps_per_dispatch,
            synthetic_acceptance_length=config.synthetic_acceptance_length,
        )
        self.programs = Programs(
            Models(target, drafter),
            settings,
            state=self.state,
            table_width=self._table_width,
            chunk=config.prefill_chunk,
            draft_loop=config.draft_loop,
            mesh=mesh,
        )
        self._served = np.zeros(0), jnp.zeros(0)
        if is_auto:
            self._times_file = times_file(target, drafter, config, self.programs.leaves)
            self.choice = DraftChoice(
                self._most_drafts,
                config.steps_per_dispatch,
                leaves_rows=self.scheduler.drafter_has_rows,
                times=StepTimes.load(self._times_file),
            )
            self.scheduler.choose = self._choose
        drafts = [*_up_to(self._most_drafts)[-2::-1], 0] if is_auto else []
        first, self.later_sizes = program_sizes(config, modes, self._most_drafts, drafts)
        self.programs.compile(first, progress=progress)
        self.programs.compile_behind(self.later_sizes)

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
        self._drop_state()

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
        self.scheduler.chunks_beside = self._chunks_beside()
        plan = self.scheduler.plan()
        for dispatch in plan:
            output, size = self._dispatch(dispatch)
            # What follows another one at once takes from that one's end to its own.
            is_timed = len(plan) == 1 and not dispatch.chunks and bool(self._in_flight)
            self._in_flight.append((dispatch, output, size if is_timed else None))
        # Without a plan all that can be done is in flight, and the oldest of it is waited for.
        ahead = len(plan) if plan else len(self._in_flight) - 1
        while len(self._in_flight) > max(ahead, 0):
            # Taken off the queue when it is committed and not before, so that nothing can lose it.
            self._commit(*self._in_flight[0])
            self._in_flight.popleft()
            self._num_failures = 0
        self._time_beside()

    def _start_afresh(self, error: BaseException) -> None:
        # The frames hold the old state, whose memory the new one needs.
        traceback.clear_frames(error.__traceback__)
        self._num_failures += 1
        self._in_flight.clear()
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
        # An engine that is closed, or that could not make a new one, has none.
        self.__dict__.pop("state", None)

    def _dispatch(self, dispatch: Dispatch) -> tuple[StepOutput, Size]:
        need = Size(
            len(dispatch.served),
            len(dispatch.chunks),
            self._mode_for([running.request for running in dispatch.served]) if dispatch.decodes else None,
            dispatch.drafts if dispatch.decodes else 0,
        )
        size = self.programs.best(need)
        assert size is not None, need
        self._put_found(dispatch)
        pieces = None
        if size.pieces:
            packed = pack_pieces(dispatch, pieces=size.pieces, width=self.config.prefill_chunk)
            pieces = jax.device_put(packed, self._whole)
        self.state, output = self.programs.dispatch(
            self.state, self._put_served(dispatch, size.slots), pieces, size=size
        )
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        self._count(dispatch, size)
        return output, size

    def _put_found(self, dispatch: Dispatch) -> None:
        """Gives the slots' histories what was found of prompts in the cache: no program reads it."""
        begin = [chunk for chunk in dispatch.chunks if chunk.is_first and chunk.start]
        if begin:
            tokens = np.full(self.state.history.shape, -1, np.int32)
            for chunk in begin:
                tokens[chunk.running.slot, : chunk.start] = chunk.running.tokens[: chunk.start]
            self.state = self.programs.put_history(self.state, jax.device_put(tokens, self._whole))

    def _put_served(self, dispatch: Dispatch, places: int) -> jax.Array:
        """The served slots on the device; the last ones again where nothing has changed."""
        packed = pack_served(dispatch, places=places, table_width=self._table_width)
        before, _ = self._served
        if not np.array_equal(packed, before):
            self._served = packed, jax.device_put(packed, self._whole)
        return self._served[1]

    def _commit(self, dispatch: Dispatch, output: StepOutput, timed: Size | None) -> None:
        # All is read before anything is committed.
        first = [] if output.first is None else _rows(output.first, FirstToken)
        emitted = [] if output.emitted is None else _steps(output.emitted)
        if self.choice is not None:
            self._learn(self.choice, dispatch, emitted, timed)
        self.counters.slot_steps_used += sum(bool(slot.tokens) for step in emitted for slot in step)
        self.scheduler.commit(dispatch, first, emitted)

    def _choose(self, decoding: Sequence[Running]) -> Choice:
        """K for slots that decode."""
        assert self.choice is not None
        mode = self._mode_for([running.request for running in decoding])
        sizes = self.programs.by_drafts(Size(len(decoding), 0, mode))
        slots = []
        for running in decoding:
            request = running.request
            if request.acceptance is None:
                request.acceptance = self.choice.new_acceptance()
            answered = len(request.token_ids)
            text = len(request.prompt) + answered
            missing = running.missing_from if self.config.prefix_caching else 0
            slots.append(
                Slot(
                    request.acceptance,
                    request.num_drafts,
                    running.missing_from is None,
                    text - (missing or 0),
                    min(answered, request.max_new_tokens - answered),
                )
            )
        prompts = self.programs.best(Size(1, 1, None))
        assert prompts is not None
        row = self.choice.times.seconds.get(_key(prompts))
        rows = prompts.pieces * self.config.prefill_chunk
        keys = {drafts: _key(size) for drafts, size in sizes.items()}
        drafts, again = self.choice.choose(slots, keys, None if row is None else row / rows)
        self._asked = sizes
        # Those that come back have to be let in again at once.
        has_room = self.scheduler.pages.num_free > 2 * len(self.scheduler.running)
        return Choice(drafts, [decoding[i] for i in again] if has_room else [])

    def _learn(
        self,
        choice: DraftChoice,
        dispatch: Dispatch,
        emitted: Sequence[Sequence[SlotStep]],
        timed: Size | None,
    ) -> None:
        now = time.perf_counter()
        if timed is not None and self._read_at is not None:
            choice.add_time(_key(timed), now - self._read_at)
        self._read_at = now
        for step in emitted:
            for running, limit, did in zip(dispatch.served, dispatch.limits, step, strict=False):
                if limit and did.tokens and running.request.acceptance is not None:
                    choice.add_step(running.request.acceptance, limit, did.accepted)

    def time_programs(self) -> bool:
        """Times some programs that have not been, by runs that serve nobody; False if there are none."""
        if self.choice is None or self.error is not None or self.programs.num_behind:
            return False
        # The smallest program for prompts says what a row costs.
        prompts = self.programs.best(Size(1, 1, None))
        sizes = [size for size in list(self.programs.compiled) if not size.pieces or size == prompts]
        try:
            if self._time_first(sizes):
                return True
        except BaseException as error:  # as in `step`
            self._start_afresh(error)
        if self._times_file is not None:
            self.choice.times.save(self._times_file)
        return False

    def _time_first(self, sizes: Sequence[Size]) -> bool:
        """Runs the programs that differ in K alone once in turn, of the first that are not timed yet.

        One after another's runs would compare the machine's moods.
        """
        assert self.choice is not None
        times = self.choice.times
        new = next((_key(size) for size in sizes if not times.is_known(_key(size))), None)
        if new is None:
            return False
        group = [size for size in sizes if _key(size)[:2] == new[:2]]
        for size in group:
            self._alone.setdefault(_key(size), []).append(self._run_alone(size))
        if len(self._alone[new]) > ALONE:
            for size in group:
                times.add_alone(_key(size), statistics.median(self._alone.pop(_key(size))[1:]))
        return True

    def _time_beside(self) -> None:
        """Times programs while requests run: what the choice asks for, and now and then one not timed yet."""
        if self.choice is None:
            return
        self._round_number += 1
        if self.choice.to_compare:
            by_key = {_key(size): size for size in self._asked.values()}
            first, other = self.choice.to_compare
            self.choice.to_compare = []
            seconds = [self._run_alone(by_key[key]) for key in (first, other)]
            self.choice.times.compare(first, seconds[0], other, seconds[1])
            self._read_at = None
        elif self._round_number % 8 == 0 and not self.programs.num_behind:
            self._time_first(list(self._asked.values()))
            self._read_at = None

    def _run_alone(self, size: Size) -> float:
        """Seconds of a run that serves nobody."""
        served = jax.device_put(empty_served(size.slots, self._table_width), self._whole)
        pieces = None
        if size.pieces:
            pieces = jax.device_put(empty_pieces(size.pieces, self.config.prefill_chunk), self._whole)
        jax.block_until_ready((self.state.length, served, pieces))
        started = time.perf_counter()
        self.state, output = self.programs.dispatch(self.state, served, pieces, size=size)
        jax.block_until_ready(output)
        return time.perf_counter() - started

    def _count(self, dispatch: Dispatch, size: Size) -> None:
        counters = self.counters
        steps = 1 if dispatch.chunks else self.config.steps_per_dispatch
        counters.dispatches += 1
        counters.prompt_rows += size.pieces * self.config.prefill_chunk
        counters.prompt_rows_used += sum(chunk.count for chunk in dispatch.chunks)
        counters.cached_rows += sum(chunk.start for chunk in dispatch.chunks if chunk.is_first)
        if dispatch.decodes:
            counters.steps += steps
            counters.slot_steps += steps * size.slots
        else:
            counters.prompt_passes += 1

    def _chunks_beside(self) -> int:
        """The pieces that a decoding step can read of prompts, with what is compiled so far."""
        everyone = Size(self.config.batch_size, 1, max(self.modes), self._most_drafts)
        return max((size.pieces for size in list(self.programs.compiled) if size.serves(everyone)), default=0)

    def _mode_for(self, requests: Iterable[Request]) -> SamplingMode:
        """The least mode that was compiled and serves all of these."""
        required = max(required_mode(request.params) for request in requests)
        return min(mode for mode in self.modes if mode >= required)


def program_sizes(
    config: ResolvedEngineConfig, modes: Sequence[SamplingMode], drafts: int, fewer: Sequence[int]
) -> tuple[list[Size], list[Size]]:
    """The programs to compile before the first request, which serve any, and those to compile later.

    Args:
      drafts, fewer: the largest K, and others that dispatches may choose.
    """
    whole = config.batch_size
    prompts = [Size(min(pieces, whole), pieces, None) for pieces in _up_to(config.prefill_rows)]
    slots = [count for count in config.slot_sizes if count < whole]
    smaller = [Size(count, 0, mode, drafts) for mode in modes for count in slots]
    choices = [Size(count, 0, mode, k) for mode in modes for count in (*slots, whole) for k in fewer]
    # A pass over rows of prompts costs what these cost, hardly what the slots beside them do.
    some = [count for count in slots if count * 8 <= whole][-1:]
    beside = [
        Size(count, pieces, max(modes), k)
        for k in (drafts, *fewer[-1:])
        for count in (whole, *some)
        for pieces in reversed(_up_to(config.rows_beside // config.prefill_chunk)[-4:])
    ]
    first = [prompts[-1], *(Size(whole, 0, mode, drafts) for mode in modes)]
    return first, [*beside[:1], *smaller[:1], *reversed(prompts[:-1]), *smaller[1:], *choices, *beside[1:]]


def times_file(
    target: Target, drafter: Drafter, config: ResolvedEngineConfig, weights: Sequence[jax.Array]
) -> Path | None:
    """Where the times of these programs on this machine are kept, beside the programs; None for nowhere."""
    shapes = [(weight.shape, str(weight.dtype)) for weight in weights]
    what = (type(drafter).__qualname__, drafter.num_speculative_tokens, target.config, config, shapes)
    where = (jax.__version__, platform.node(), os.cpu_count(), jax.devices()[0].device_kind)
    digest = blake2b(repr((what, where)).encode(), digest_size=16).hexdigest()
    with compilation_cache() as folder:
        return None if folder is None else folder / f"jaxspec-times-{digest}.json"


def _key(size: Size) -> Key:
    return size.slots, -1 if size.mode is None else int(size.mode), size.drafts


def _up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most`; nothing for 0."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*powers, most] if most else []


def _one_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _rows(output: Any, row: Callable) -> list[Any]:
    """Of arrays with a leading axis a `row` of Python's numbers for each: arrays cost more to index."""
    leaves = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(output)]
    return [row(*values) for values in zip(*leaves, strict=True)]


def _steps(emitted: Emitted) -> list[list[SlotStep]]:
    def of_step(tokens: list[list[int]], counts: list[int], *rest: list) -> list[SlotStep]:
        rows = zip(tokens, counts, *rest, strict=True)
        return [SlotStep(row[:count], *values) for row, count, *values in rows]

    return _rows(emitted, of_step)
