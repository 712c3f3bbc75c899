"""How many drafts pay: K of every dispatch, by measured times and estimated acceptance. No arrays.

A dispatch of K drafts gives the sum over its slots of E[tokens of a step | K], times its steps, in the time
that its program takes. The largest quotient is taken, with a margin against noise. What is not in use is
tried now and then, for a small share of the time.
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
"""By how much another K has to be better."""
SHARE = 0.008
"""Of the time, for trying what is not in use."""
BURST = 8
"""Dispatches of one trial, at least."""
PATIENCE = 64
"""Dispatches between trials, at least."""
MEMORY, ENGINE_MEMORY = 128.0, 4096.0
"""Tries of a draft that a request's estimate goes back, and the engine's."""
ALONE = 12
"""Runs without requests that a new program is timed by."""
WEIGHT = 16.0
"""Tries that what is believed beforehand counts for."""
FIRST_GUESS = 0.98
"""That a draft is accepted, before anything is known; of later drafts, what is known of the one before."""


class Acceptance:
    """The chance that each draft is accepted where those before it were, by counts that fade."""

    def __init__(self, drafts: int, memory: float = MEMORY):
        self.memory = memory
        self.tried, self.passed = [0.0] * drafts, [0.0] * drafts

    def add(self, drafts: int, accepted: int) -> None:
        """Counts a step; a slot without drafts counts, if it might have had some."""
        for i in range(min(accepted + 1, drafts)):
            self.tried[i] += 1 - self.tried[i] / self.memory
            self.passed[i] += (i < accepted) - self.passed[i] / self.memory

    def rates(self, before: Sequence[float] | None = None) -> list[float]:
        """Of each draft; `before`, what is believed beforehand."""
        rates: list[float] = []
        for i, (tried, passed) in enumerate(zip(self.tried, self.passed, strict=True)):
            belief = before[i] if before else rates[-1] if rates else FIRST_GUESS
            rates.append((passed + WEIGHT * belief) / (tried + WEIGHT))
        return rates

    def expected(self, before: Sequence[float]) -> list[float]:
        """Tokens of a step with 0, 1, … drafts."""
        expected, chance = [1.0], 1.0
        for rate in self.rates(before):
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


class StepTimes:
    """Seconds that a dispatch of each program takes, as far as is known.

    The program in use says how the machine and the texts change: what it takes more, all take more. The
    others say how they differ from it.
    """

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        self._counts: dict[Key, int] = {}

    @classmethod
    def load(cls, path: Path | None) -> "StepTimes":
        """What an earlier process has found; nothing where there is no such file, or another one."""
        times = cls()
        with suppress(OSError, ValueError, TypeError):
            for slots, mode, drafts, seconds in json.loads(path.read_text("utf-8")) if path else ():
                if math.isfinite(seconds) and seconds > 0:
                    times.add_alone((int(slots), int(mode), int(drafts)), float(seconds))
        return times

    def save(self, path: Path) -> None:
        """Replaces the file whole; without room for it, what is known is measured again next time."""
        rows = [[*key, seconds] for key, seconds in self.seconds.items() if self.is_known(key)]
        with suppress(OSError):
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(rows), "utf-8")
            partial.replace(path)

    def is_known(self, key: Key) -> bool:
        """Whether it has been compared with others."""
        return key in self._counts

    def add(self, key: Key, seconds: float, *, in_use: bool) -> None:
        """Takes a dispatch among requests."""
        error = math.log(seconds / self.seconds.setdefault(key, seconds))
        # A pause of the process says nothing.
        error = min(max(error, -0.5), 0.5)
        if in_use:
            shift = math.exp(0.03 * error)
            for every in self.seconds:
                self.seconds[every] *= shift
        else:
            self._correct(key, error)

    def add_alone(self, key: Key, seconds: float) -> None:
        """Takes the median of `ALONE` runs without requests."""
        self.seconds[key], self._counts[key] = seconds, ALONE

    def compare(self, key: Key, seconds: float, to: Key, to_seconds: float) -> None:
        """Takes a run of a program without requests, and one of another beside it."""
        error = math.log(seconds / to_seconds * self.seconds[to] / self.seconds[key])
        self._correct(key, min(max(error, -0.5), 0.5))

    def _correct(self, key: Key, error: float) -> None:
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self.seconds[key] *= math.exp(error * max(1 / count, 0.05))


class Slot(NamedTuple):
    """What the choice has to know of a slot.

    Attributes:
      acceptance: of its request.
      limit: its own number of drafts; None goes with the dispatch.
      is_whole: whether the drafter has all rows of it; a slot that lacks some goes without drafts.
      again: rows to read again, so that it has.
      left: tokens that it may be expected to need still.
    """

    acceptance: Acceptance
    limit: int | None
    is_whole: bool
    again: int
    left: int


class DraftChoice:
    """Chooses K.

    Attributes:
      times: of the programs.
      acceptance: of all requests, from which a new one's starts.
      to_compare: a program to run without requests, and one to run beside it; whoever does empties it.
    """

    def __init__(self, drafts: int, steps: int, *, leaves_rows: bool, times: StepTimes | None = None):
        """Args:
        drafts: the largest K.
        steps: of a dispatch.
        leaves_rows: the drafter lacks rows after plain decoding, so that a slot has to be read again.
        """
        self.drafts, self.steps, self.leaves_rows = drafts, steps, leaves_rows
        self.times = times or StepTimes()
        self.acceptance = Acceptance(drafts, ENGINE_MEMORY)
        self.to_compare: list[Key] = []
        self._in_use: dict[tuple[int, int], int] = {}
        self._budget = 0.0
        self._waited = 0
        self._tries = 0
        self._trial = (0, 0)  # K, and the dispatches left

    def new_acceptance(self) -> Acceptance:
        """Of a new request."""
        return Acceptance(self.drafts)

    def add_step(self, acceptance: Acceptance, drafts: int, accepted: int) -> None:
        """Takes what became of a step's drafts, whether or not there were as many."""
        acceptance.add(drafts, accepted)
        self.acceptance.add(drafts, accepted)

    def add_time(self, key: Key, seconds: float) -> None:
        """Takes what a dispatch among others took."""
        self._budget = min(self._budget + SHARE * seconds, 100 * seconds)
        self.times.add(key, seconds, in_use=self._in_use.get(key[:2], self.drafts) == key[2])

    def choose(
        self, slots: Sequence[Slot], keys: Mapping[int, Key], row_seconds: float | None
    ) -> tuple[int, list[int]]:
        """K for slots, and which of them to read again.

        Args:
          keys: the programs that may run, by their K; of the largest K at least.
          row_seconds: what reading a row of a prompt takes; None where that is not known.
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

        def rate(k: int, again: Iterable[int] = ()) -> float:
            tokens = 0.0
            for i, (slot, of_slot) in enumerate(zip(slots, expected, strict=True)):
                drafts = slot.limit if slot.limit is not None else k if slot.is_whole or i in again else 0
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
        again = self._worth_reading(slots, seconds, rates[now], now, rate, row_seconds)
        if again:
            return now, again
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
        """The slots without some of the drafter's rows, where drafting for them pays for reading these."""
        lacking = {i for i, slot in enumerate(slots) if not slot.is_whole and slot.limit is None}
        lacking = {i for i in lacking if slots[i].again <= slots[i].left}
        if not lacking or row_seconds is None or not any(seconds):
            return []
        left = sum(slot.left for slot in slots)
        price = seconds[now] + row_seconds * sum(slots[i].again for i in lacking)
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
        """K in use, or another one for a few dispatches."""
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
        if not k and self.leaves_rows:
            # Among requests it would leave rows behind: without them, then.
            price = 2 * seconds[now]
            if price <= self._budget:
                self._spend(price)
                self.to_compare = [keys[0], keys[now]]
            return now, []
        # What it gives less than the one in use, were the drafts no good.
        loss = max(seconds[k] - self.steps * len(slots) / rates[now], 0.02 * seconds[k])
        loss = min(loss, max(seconds[k] * (1 - rates[k] / rates[now]), 0.02 * seconds[k]) * 2)
        # The cheaper the longer.
        length = min(max(int(self._budget / loss / 2), BURST), 4 * BURST)
        price, again = length * loss, []
        lacking = [i for i, slot in enumerate(slots) if not slot.is_whole and slot.limit is None]
        if not now and lacking and not any(slot.is_whole and slot.limit is None for slot in slots):
            if row_seconds is None:
                return now, []
            cheapest = min(lacking, key=lambda i: slots[i].again - slots[i].left)
            again = [cheapest]
            price += seconds[now] + row_seconds * slots[cheapest].again
        if price > self._budget:
            return now, []
        if again:
            # It comes back with all rows, and is tried then.
            self._budget -= price - length * loss
            return now, again
        self._spend(price)
        self._trial = k, length - 1
        return k, []

    def _spend(self, price: float) -> None:
        self._budget -= price
        self._waited = 0
        self._tries += 1
