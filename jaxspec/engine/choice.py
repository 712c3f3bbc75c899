"""Chooses K for every dispatch from measured times and estimated acceptance. No arrays.

The expected tokens of a dispatch are its steps times the sum over its slots of E[tokens of a step | K]. The K
with the most expected tokens per second is taken, with a margin against noise. Other values of K are tried
now and then, for a small share of the time.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

Key = tuple[int, int, int]
"""A program: its slots, its sampling mode, its K."""

MARGIN = 0.01
"""How much better, as a share, another K must be to replace the one in use."""
TRIAL_SHARE = 0.008
"""The share of the time that goes to trying other values of K."""
BURST = 8
"""The least number of dispatches of one trial."""
PATIENCE = 64
"""The least number of dispatches between two trials."""
MEMORY, ENGINE_MEMORY = 128.0, 4096.0
"""Time constants of the fading counts, in tries of a draft: a request's, and the whole engine's."""
TIMING_RUNS = 12
"""Runs without requests from which a new program's time is taken."""
PRIOR_WEIGHT = 16.0
"""Tries that the prior acceptance rate counts for."""
PRIOR_RATE = 0.98
"""Prior acceptance rate of the first draft; that of each later draft is the rate of the draft before it."""


class Acceptance:
    """The probability that each draft is accepted if all before it were, from counts that fade.

    Attributes:
      memory: the time constant of the fading, in tries.
      tried, passed: fading counts of each draft, [drafts].
    """

    def __init__(self, drafts: int, memory: float = MEMORY):
        self.memory = memory
        self.tried, self.passed = [0.0] * drafts, [0.0] * drafts

    def add(self, drafts: int, accepted: int) -> None:
        """Counts a step that could have `drafts` drafts; one that was not proposed counts as rejected."""
        for i in range(min(accepted + 1, drafts)):
            self.tried[i] += 1 - self.tried[i] / self.memory
            self.passed[i] += (i < accepted) - self.passed[i] / self.memory

    def rates(self, before: Sequence[float] | None = None) -> list[float]:
        """The rate of each draft; `before` gives the prior rates."""
        rates: list[float] = []
        for i, (tried, passed) in enumerate(zip(self.tried, self.passed, strict=True)):
            prior = before[i] if before else rates[-1] if rates else PRIOR_RATE
            rates.append((passed + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT))
        return rates

    def expected(self, before: Sequence[float]) -> list[float]:
        """Expected tokens of a step with 0, 1, … drafts; `before` gives the prior rates."""
        expected, chance = [1.0], 1.0
        for rate in self.rates(before):
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


class StepTimes:
    """Seconds of one dispatch of each program that has been timed.

    A change in the time of the program in use is taken for a change of the machine or of the texts, and
    scales the times of all programs. The times of the others only correct their ratio to it.
    """

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        self._counts: dict[Key, int] = {}

    @classmethod
    def load(cls, path: Path | None) -> "StepTimes":
        """The times that an earlier process saved; none if the file is missing or malformed."""
        times = cls()
        with suppress(OSError, ValueError, TypeError):
            for slots, mode, drafts, seconds in json.loads(path.read_text("utf-8")) if path else ():
                if math.isfinite(seconds) and seconds > 0:
                    times.add_alone((int(slots), int(mode), int(drafts)), float(seconds))
        return times

    def save(self, path: Path) -> None:
        """Replaces the file atomically. If it cannot be written, the next process measures again."""
        rows = [[*key, seconds] for key, seconds in self.seconds.items() if self.is_known(key)]
        with suppress(OSError):
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(rows), "utf-8")
            partial.replace(path)

    def is_known(self, key: Key) -> bool:
        """Whether the program has been measured against the others."""
        return key in self._counts

    def add(self, key: Key, seconds: float, *, in_use: bool) -> None:
        """Adds the time of a dispatch that served requests; `in_use`, if its K is the one in use."""
        error = math.log(seconds / self.seconds.setdefault(key, seconds))
        # The process may have been paused.
        error = min(max(error, -0.5), 0.5)
        if in_use:
            shift = math.exp(0.03 * error)
            for every in self.seconds:
                self.seconds[every] *= shift
        else:
            self._correct(key, error)

    def add_alone(self, key: Key, seconds: float) -> None:
        """Sets a program's time to `seconds`, the median of `TIMING_RUNS` runs without requests."""
        self.seconds[key], self._counts[key] = seconds, TIMING_RUNS

    def compare(self, key: Key, seconds: float, to: Key, to_seconds: float) -> None:
        """Corrects a program's time by one run of it, without requests, and one run of another program."""
        error = math.log(seconds / to_seconds * self.seconds[to] / self.seconds[key])
        self._correct(key, min(max(error, -0.5), 0.5))

    def _correct(self, key: Key, error: float) -> None:
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self.seconds[key] *= math.exp(error * max(1 / count, 0.05))


class Slot(NamedTuple):
    """What the choice needs to know about a slot.

    Attributes:
      acceptance: its request's.
      limit: the number of drafts its request asked for; None takes the dispatch's K.
      is_whole: whether the drafter has cached all of its rows; a slot that lacks some gets no drafts.
      missing_rows: rows to read again before the drafter has all of them.
      expected_tokens: tokens that it is expected to need still.
    """

    acceptance: Acceptance
    limit: int | None
    is_whole: bool
    missing_rows: int
    expected_tokens: int


class DraftChoice:
    """Chooses K.

    Attributes:
      times: the programs' times.
      acceptance: counts over all requests, the prior of each single one.
      to_compare: two programs to run once each without requests, to compare their times; empty for none.
        The caller empties it when that is done.
    """

    def __init__(self, drafts: int, steps: int, *, drafter_has_rows: bool, times: StepTimes | None = None):
        """Args:
        drafts: the largest K.
        steps: S, engine steps of a dispatch.
        drafter_has_rows: as in `Scheduler`: if it has, a slot must be read again after plain decoding, before
          it gets drafts.
        times: measured earlier; None starts without any.
        """
        self.drafts, self.steps, self.drafter_has_rows = drafts, steps, drafter_has_rows
        self.times = times or StepTimes()
        self.acceptance = Acceptance(drafts, ENGINE_MEMORY)
        self.to_compare: list[Key] = []
        self._in_use: dict[tuple[int, int], int] = {}
        self._budget = 0.0
        self._waited = 0
        self._tries = 0
        self._trial = (0, 0)  # K, and the dispatches left

    def new_acceptance(self) -> Acceptance:
        """The counts of a new request."""
        return Acceptance(self.drafts)

    def add_step(self, acceptance: Acceptance, drafts: int, accepted: int) -> None:
        """Counts a step in one request's counts and in the engine's; arguments as of `Acceptance.add`."""
        acceptance.add(drafts, accepted)
        self.acceptance.add(drafts, accepted)

    def add_time(self, key: Key, seconds: float) -> None:
        """Adds the time of a dispatch that served requests."""
        self._budget = min(self._budget + TRIAL_SHARE * seconds, 100 * seconds)
        self.times.add(key, seconds, in_use=self._in_use.get(key[:2], self.drafts) == key[2])

    def choose(
        self, slots: Sequence[Slot], keys: Mapping[int, Key], row_seconds: float | None
    ) -> tuple[int, list[int]]:
        """K for these slots, and the indices of those to read again so that they can get drafts.

        Args:
          keys: the programs that may run, by their K; the largest K is always among them.
          row_seconds: time to read one row of a prompt; None if it is not known yet.
        """
        most = max(keys)
        least = max(slot.limit or 0 for slot in slots)
        seconds = {
            k: self.times.seconds[key] for k, key in keys.items() if k >= least and key in self.times.seconds
        }
        if most not in seconds:
            return most, []
        before = self.acceptance.rates()
        expected = [slot.acceptance.expected(before) for slot in slots]

        def rate(k: int, reread: Iterable[int] = ()) -> float:
            tokens = 0.0
            for i, (slot, of_slot) in enumerate(zip(slots, expected, strict=True)):
                drafts = slot.limit if slot.limit is not None else k if slot.is_whole or i in reread else 0
                tokens += of_slot[drafts]
            return self.steps * tokens / seconds[k]

        rates = {k: rate(k) for k in seconds}
        group = keys[most][:2]
        best = max(rates, key=rates.__getitem__)
        now = self._in_use.get(group, most)
        if now not in rates or rates[best] > rates[now] * (1 + MARGIN):
            now = best
        if not least:
            self._in_use[group] = now
        reread = self._worth_reading(slots, seconds, rates[now], now, rate, row_seconds)
        if reread:
            return now, reread
        return self._try(slots, keys, seconds, rates, now, row_seconds)

    def _worth_reading(
        self,
        slots: Sequence[Slot],
        seconds: Mapping[int, float],
        rate_now: float,
        now: int,
        rate: Callable[[int, Iterable[int]], float],
        row_seconds: float | None,
    ) -> list[int]:
        """All slots that lack rows of the drafter's, if drafting for them pays for reading these rows."""
        lacking = {i for i, slot in enumerate(slots) if not slot.is_whole and slot.limit is None}
        lacking = {i for i in lacking if slots[i].missing_rows <= slots[i].expected_tokens}
        if not lacking or row_seconds is None or not any(seconds):
            return []
        left = sum(slot.expected_tokens for slot in slots)
        price = seconds[now] + row_seconds * sum(slots[i].missing_rows for i in lacking)
        best = max(rate(k, lacking) for k in seconds if k)
        return sorted(lacking) if left / best + price < left / rate_now * (1 - MARGIN) else []

    def _try(
        self,
        slots: Sequence[Slot],
        keys: Mapping[int, Key],
        seconds: Mapping[int, float],
        rates: Mapping[int, float],
        now: int,
        row_seconds: float | None,
    ) -> tuple[int, list[int]]:
        """K in use, or a neighbouring K for a few dispatches where the budget allows a trial."""
        k, left = self._trial
        if left and k in rates:
            self._trial = k, left - 1
            return k, []
        self._waited += 1
        others = [k for k in sorted(seconds) if k != now]
        if self._waited < PATIENCE or not others:
            return now, []
        below, above = [k for k in others if k < now][-1:], [k for k in others if k > now][:1]
        near = below + above
        k = near[self._tries % len(near)]
        if not k and self.drafter_has_rows:
            # Serving requests, it would leave the drafter without their rows: run it without requests.
            price = 2 * seconds[now]
            if price <= self._budget:
                self._spend(price)
                self.to_compare = [keys[0], keys[now]]
            return now, []
        # The loss against the K in use if every draft were rejected,
        loss = max(seconds[k] - self.steps * len(slots) / rates[now], 0.02 * seconds[k])
        # and at most twice the loss that the estimated rates give.
        loss = min(loss, max(seconds[k] * (1 - rates[k] / rates[now]), 0.02 * seconds[k]) * 2)
        length = min(max(int(self._budget / loss / 2), BURST), 4 * BURST)
        price, reread = length * loss, []
        lacking = [i for i, slot in enumerate(slots) if not slot.is_whole and slot.limit is None]
        if not now and lacking and not any(slot.is_whole and slot.limit is None for slot in slots):
            if row_seconds is None:
                return now, []
            cheapest = min(lacking, key=lambda i: slots[i].missing_rows - slots[i].expected_tokens)
            reread = [cheapest]
            price += seconds[now] + row_seconds * slots[cheapest].missing_rows
        if price > self._budget:
            return now, []
        if reread:
            # The trial follows once the request is back with all rows.
            self._budget -= price - length * loss
            return now, reread
        self._spend(price)
        self._trial = k, length - 1
        return k, []

    def _spend(self, price: float) -> None:
        self._budget -= price
        self._waited = 0
        self._tries += 1
