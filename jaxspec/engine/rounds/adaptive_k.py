"""Adaptive K: connects the choice of K to an engine, times its programs and counts its accepted drafts."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import jax
import numpy as np

from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.outcome import Outcome
from jaxspec.engine.device.plan import Size
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.host.choice import DraftChoice, Key, Slots, StepTimes
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Choice, Dispatch, Running, Scheduler
from jaxspec.jax_settings import default_device
from jaxspec.sampling import Logprobs, SamplingMode

TIMING_RUNS = 3
"""Measurements without requests from which a new program's time is taken."""


class AdaptiveK:
    """Chooses K for a scheduler with a `DraftChoice`, and takes the measurements that this needs.

    Attributes:
      choice: decides, from the measurements.
    """

    def __init__(
        self,
        programs: Programs,
        scheduler: Scheduler,
        config: ResolvedEngineConfig,
        *,
        drafts: int,
        need_for: Callable[[Sequence[Request]], Size],
        run_alone: Callable[[Size], float],
        times_file: Path | None,
    ):
        """Args:
        drafts: the largest K.
        need_for: returns what plain decoding for these requests needs.
        run_alone: runs a program without requests and returns the seconds of a run.
        times_file: where times are kept between processes; None keeps none.
        """
        self._programs, self._scheduler, self._config = programs, scheduler, config
        self._need_for, self._run_alone, self._times_file = need_for, run_alone, times_file
        self.choice = DraftChoice(drafts, config.steps_per_dispatch, StepTimes.load(times_file))
        self._read_at: float | None = None
        self._round_number = 0
        self._asked: dict[int, Size] = {}
        self._alone: dict[Key, list[float]] = {}

    def choose(self, decoding: Sequence[Running]) -> Choice:
        """K for the next dispatch of these slots, and which of them to read again first."""
        requests = [running.request for running in decoding]
        sizes = self._programs.by_drafts(self._need_for(requests))
        slots = Slots(
            [request.num_drafts for request in requests],
            list(map(self._missing_rows, decoding)),
            list(map(_expected_tokens, requests)),
        )
        prompts = self._programs.best(Size(1, 1))
        assert prompts is not None
        row = self.choice.times.seconds.get(_key(prompts))
        rows = prompts.chunks * self._config.prefill_chunk
        keys = {drafts: _key(size) for drafts, size in sizes.items()}
        drafts, reread = self.choice.choose(slots, keys, None if row is None else row / rows)
        self._asked = sizes
        # A request that is put back to be read again must be admitted at once.
        has_room = self._scheduler.pages.num_free > 2 * len(self._scheduler.running)
        return Choice(drafts, [decoding[i] for i in reread] if has_room else [])

    def record(self, dispatch: Dispatch, outcome: Outcome, timed: Size | None) -> None:
        """Records what a dispatch accepted, and how long it took.

        Args:
          outcome: that of its slots, on the host.
          timed: the dispatch's program if it followed another dispatch without a pause, so that it took the
            time since the other one's end; otherwise None.
        """
        now = time.perf_counter()
        if timed is not None and self._read_at is not None:
            # Times are those of S steps.
            steps = self._config.steps_per_dispatch
            self.choice.times.add(_key(timed), (now - self._read_at) * steps / dispatch.steps)
        self._read_at = now
        if dispatch.decodes:
            accepted = np.where(np.asarray(outcome.num_tokens) > 0, np.asarray(outcome.accepted), -1)
            self.choice.add_steps(np.array(dispatch.limits), accepted[:, : len(dispatch.batch)])

    def _missing_rows(self, running: Running) -> int | None:
        if running.missing_from is None:
            return None
        return running.request.num_tokens - (running.missing_from if self._config.prefix_caching else 0)

    def time_programs(self) -> bool:
        """Times some programs that have no time yet, while the engine is idle; False if all have one."""
        if self._programs.num_uncompiled:
            return False
        # The time of the smallest prefill program gives the cost of a row.
        prompts = self._programs.best(Size(1, 1))
        sizes = [size for size in list(self._programs.compiled) if not size.chunks or size == prompts]
        if self._time_first(sizes):
            return True
        if self._times_file is not None:
            self.choice.times.save(self._times_file)
        return False

    def time_between_rounds(self) -> None:
        """Times programs that have no time yet while requests run."""
        self._round_number += 1
        if self._round_number % 8 == 0 and not self._programs.num_uncompiled:
            self._time_first(list(self._asked.values()))
            self._read_at = None

    def _time_first(self, sizes: Sequence[Size]) -> bool:
        """Times once each program of the first group, alike except for K, that has no time yet.

        They take turns, because the machine's speed drifts: timed one after the other, each would be
        measured at a different speed.
        """
        times = self.choice.times.seconds
        new = next((_key(size) for size in sizes if _key(size) not in times), None)
        if new is None:
            return False
        group = [size for size in sizes if _key(size)[:2] == new[:2]]
        for size in group:
            self._alone.setdefault(_key(size), []).append(self._run_alone(size))
        if len(self._alone[new]) >= TIMING_RUNS:
            for size in group:
                times[_key(size)] = statistics.median(self._alone.pop(_key(size)))
        return True


def times_file(
    target: Target, drafter: Drafter, config: ResolvedEngineConfig, weights: Sequence[jax.Array]
) -> Path | None:
    """The file for these programs' times on this machine, in the compilation cache; None without a cache."""
    shapes = [
        (weight.shape, weight.sharding.shard_shape(weight.shape), str(weight.dtype)) for weight in weights
    ]
    what = (type(drafter).__qualname__, drafter.num_speculative_tokens, target.config, config, shapes)
    where = (jax.__version__, platform.node(), os.cpu_count(), default_device().device_kind)
    digest = blake2b(repr((what, where)).encode(), digest_size=16).hexdigest()
    with compilation_cache() as folder:
        return None if folder is None else folder / f"jaxspec-times-{digest}.json"


def _key(size: Size) -> Key:
    """Programs that report log-probabilities, or apply constraints, have modes of their own."""
    asked = int(size.logprobs) + len(Logprobs) * int(size.constraints)
    mode = int(size.mode) + len(SamplingMode) * asked
    return size.slots, mode if size.width else -1, size.drafts


def _expected_tokens(request: Request) -> int:
    """An answer is expected to become twice as long, if it may."""
    answered = len(request.token_ids)
    return min(answered, request.max_new_tokens - answered)
