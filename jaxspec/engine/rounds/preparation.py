"""Which programs an engine has: those of its load, and those that requests ask for."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial, reduce
from threading import Lock

from jaxspec.config import ResolvedEngineConfig
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.compiling import Compiling
from jaxspec.engine.device.plan import Size
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.errors import EngineError
from jaxspec.engine.host.grammars import GrammarStore
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Running, Scheduler
from jaxspec.jax_settings import own_settings
from jaxspec.sampling import Asked, Constraints, Logprobs, SamplingMode, required_mode


class Preparation:
    """Decides which programs are compiled, and which of them a dispatch needs.

    Attributes:
      sizes: the programs compiled before the first request, and those compiled later, in the background; each
        without log-probabilities and constraints.
      modes: the sampling modes that have a decode program.
    """

    def __init__(
        self,
        programs: Programs,
        config: ResolvedEngineConfig,
        grammars: GrammarStore,
        *,
        modes: tuple[SamplingMode, ...],
        drafts: int,
        is_adaptive: bool,
        reads_history: bool,
    ):
        """Compiles nothing yet.

        Args:
          drafts: the largest K.
          reads_history: whether the drafter does, so that programs for it are there in any case.
        """
        self.programs, self.config, self.grammars, self.modes = programs, config, grammars, modes
        self._max_drafts, self._reads_history = drafts, reads_history
        self.sizes = program_sizes(config, modes, drafts, _fewer_drafts(drafts) if is_adaptive else [])
        self._error: EngineError | None = None
        self._prepared: set[tuple[Asked, SamplingMode]] = set()
        self._scores: set[tuple[Logprobs, tuple[int, ...]]] = set()
        self._preparing = Lock()
        self._closed = Future[None]()

    def close(self, error: EngineError) -> None:
        """Whoever waits for a program gets this error, and so does whoever asks later."""
        self._error = error
        if not self._closed.done():
            self._closed.set_result(None)

    def mixed_chunks(self, scheduler: Scheduler) -> list[int]:
        """The numbers of prompt chunks, ascending, that the step programs compiled so far can read."""
        everyone = Size(self.config.batch_size, 1, max(self.modes), self._max_drafts + 1)
        counts = sorted(size.chunks for size in self.programs.serving(everyone))
        if self._prepared:
            # The first of the queue may be admitted, and may not.
            waiting = scheduler.waiting[: self.config.batch_size]
            next_ones = [*(running.request for running in scheduler.running), *waiting]
            asking = everyone.doing(_asked(next_ones))
            more = sorted(size.chunks for size in self.programs.serving(asking))
            counts = min(counts, more, key=lambda counts: counts[-1:])
        return counts

    def need(self, requests: Sequence[Request], chunks: int = 0, width: int = 1) -> Size:
        """What these requests need, by default for plain decoding, with the least compiled mode that serves
        them all."""
        mode = SamplingMode.GREEDY
        if width:
            mode = self._mode(max(required_mode(request.params) for request in requests))
        need = Size(len(requests), chunks, mode, width)
        return need.doing(_asked(requests)) if self._prepared else need

    def _mode(self, required: SamplingMode) -> SamplingMode:
        """The least mode with programs that samples as required."""
        return min(mode for mode in self.modes if mode >= required)

    def share_program(self, running: Sequence[Running], decodes: bool) -> list[Running]:
        """See `Scheduler.plan`. All share one, unless what was asked for has no program yet in the mode that
        the others need."""
        if not self._prepared or len(running) < 2:
            return list(running)
        config = self.config
        chunks, width = (0, self._max_drafts + 1) if decodes else (config.prefill_batch_size, 0)

        def is_served(some: Sequence[Running]) -> bool:
            need = self.need([each.request for each in some], chunks, width)
            # A dispatch that reads prompts serves no more requests than it has chunks.
            need = need if decodes else replace(need, slots=min(chunks, config.batch_size))
            return bool(self.programs.serving(need))

        if is_served(running):
            return list(running)
        shared = [running[0]]
        for each in running[1:]:
            if is_served([*shared, each]):
                shared.append(each)
        return shared

    def prepare_scores(self, report: Logprobs, layers: tuple[int, ...]) -> None:
        """Compiles the programs that score texts, the one that serves any number of chunks before this
        returns. Called by any thread, with every such request; nothing is left to do after the first.

        Raises:
          EngineError: the engine has been closed meanwhile.
        """
        if (report, layers) not in self._scores:
            self._unless_closed(partial(self._prepare_scores, report, layers))

    def _prepare_scores(self, report: Logprobs, layers: tuple[int, ...]) -> None:
        with self._preparing:
            if (report, layers) in self._scores or self._error is not None:
                return
            sizes = prompt_sizes(self.config)[::-1]
            first, *later = [replace(size, scores=report, layers=layers) for size in sizes]
            with compilation_cache():
                self.programs.compile([first], progress=False)
            self._scores.add((report, layers))
        if self._error is not None:
            return
        self.programs.compile_in_background(later)

    def _sizes_doing(self, asked: Asked) -> list[list[Size]]:
        """`sizes`, of programs that do what is asked for."""
        return [[size.doing(asked) for size in sizes] for sizes in self.sizes]

    def prepare(self, wanted: Asked, modes: Collection[SamplingMode] = ()) -> None:
        """Compiles the programs without which nobody who asks for this could be served: one that reads
        prompts, and for each mode one that decodes, for any number of slots.

        Called by any thread, with every request that asks for something; nothing is left to do after the
        first that asks for it. Requests that ask for different things may share a dispatch, so what is
        compiled at once does all that was ever asked for. Programs for the other modes, for no more than
        this, and smaller ones follow in the background.

        Args:
          modes: those that are required; none means all of this engine.

        Raises:
          EngineError: the engine has been closed meanwhile.
        """
        if left := self._unprepared(wanted, set(map(self._mode, modes or self.modes))):
            self._unless_closed(partial(self._prepare, wanted, left))

    def _unprepared(self, wanted: Asked, modes: set[SamplingMode]) -> set[SamplingMode]:
        return {mode for mode in modes if (wanted, mode) not in self._prepared}

    def _unless_closed(self, compile_programs: Callable[[], None]) -> None:
        """Runs it in a thread of its own, since it cannot be interrupted; waits for it or for `close`."""
        with Compiling(compile_programs, name="jaxspec-prepare") as compiling:
            wait([compiling.future, self._closed], return_when=FIRST_COMPLETED)
            if not compiling.future.done():
                raise self._error or EngineError("the engine is closed")
            compiling.future.result()

    def _prepare(self, wanted: Asked, modes: set[SamplingMode]) -> None:
        with self._preparing:
            modes = self._unprepared(wanted, modes)
            if self._error is not None:
                raise self._error
            if not modes:
                return
            most = reduce(Asked.join, (asked for asked, _ in self._prepared), wanted)
            first, later = self._sizes_doing(wanted)
            for_all, for_all_later = self._sizes_doing(most)
            needed = [size for size in for_all if not size.width or size.mode in modes]
            with compilation_cache():
                if wanted.constraints & Constraints.GRAMMAR:
                    with own_settings(self.programs.mesh.devices.flat[0]):
                        self.grammars.prepare()
                if wanted.constraints.needs_history and not self._reads_history:
                    self.programs.compile_put_history()
                self.programs.compile(list(filter(self._is_unserved, needed)), progress=False)
            self._prepared |= {(wanted, mode) for mode in modes}
        if self._error is not None:
            return
        self.programs.compile_in_background([*for_all, *first, *for_all_later, *later])

    def _is_unserved(self, need: Size) -> bool:
        """Whether no compiled program does as much or more. Unlike `Programs.serving`, for any thread."""
        return not any(size.serves(need) for size in list(self.programs.compiled))


def program_sizes(
    config: ResolvedEngineConfig, modes: Sequence[SamplingMode], drafts: int, fewer: Sequence[int]
) -> tuple[list[Size], list[Size]]:
    """The programs to compile before the first request, and those to compile later, the likeliest first.

    The first ones serve any request.

    Args:
      modes: the sampling modes to compile decode programs for.
      drafts: the largest K.
      fewer: the other values of K that a dispatch may have, the largest first.
    """
    whole = config.batch_size
    prompts = prompt_sizes(config)
    slots = [count for count in config.slot_sizes if count < whole]
    smaller = [Size(count, 0, mode, drafts + 1) for mode in modes for count in slots]
    choices = [Size(count, 0, mode, k + 1) for mode in modes for count in (*slots, whole) for k in fewer]
    # The prompt rows dominate the cost of such a pass, so few numbers of slots are worth a program.
    some = [count for count in slots if count * 8 <= whole][-1:]
    mixed = [
        Size(count, chunks, max(modes), k + 1)
        for k in (drafts, *fewer[-1:])
        for count in (whole, *some)
        for chunks in reversed(_up_to(config.mixed_prefill_tokens // config.prefill_chunk)[-5:])
    ]
    first = [prompts[-1], *(Size(whole, 0, mode, drafts + 1) for mode in modes)]
    return first, [*mixed[:1], *smaller[:1], *reversed(prompts[:-1]), *smaller[1:], *choices, *mixed[1:]]


def prompt_sizes(config: ResolvedEngineConfig) -> list[Size]:
    """The programs that only read prompts, the smallest first."""
    return [Size(min(chunks, config.batch_size), chunks) for chunks in _up_to(config.prefill_batch_size)]


def _fewer_drafts(most: int) -> list[int]:
    """The values of K below the largest that are worth a program, the largest first: 0, and a third less each
    time. If it were half, the best of these could be more than 3 % slower than the best K."""
    drafts, k = [], most
    while k:
        k = min(k - 1, -(-2 * k // 3))
        drafts.append(k)
    return drafts


def _up_to(limit: int) -> list[int]:
    """The powers of two below `limit`, then `limit`; empty for 0."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i < limit]
    return [*powers, limit] if limit else []


def _asked(requests: Sequence[Request]) -> Asked:
    """What a program must do for all of these."""
    return reduce(Asked.join, (request.asked for request in requests), Asked())
