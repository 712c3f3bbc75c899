"""Chooses K for every dispatch from measured times and estimated acceptance, on the host.

The expected tokens of a dispatch are its steps times the sum over its slots of E[tokens of a step | K]. The K
with the most expected tokens per second is taken, with a margin against noise. Other values of K are tried
now and then, for a small share of the time.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

Key = tuple[int, int, int]
"""A program: its slots, a number for its sampling mode and what it reports, its K."""

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


def fade_in(counts: np.ndarray, tries: np.ndarray, passes: np.ndarray, memory: float) -> None:
    """Adds to fading counts, in place.

    Args:
      counts: f64[..., 2, drafts], for each draft how often it was tried, and how often it was accepted.
      tries, passes: [..., drafts], what to add.
      memory: the time constant of the fading, in tries.
    """
    kept = (1 - 1 / memory) ** tries
    weight = memory * (1 - kept) / np.maximum(tries, 1)
    counts *= kept[..., None, :]
    counts[..., 0, :] += weight * tries
    counts[..., 1, :] += weight * passes


def rates(counts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The probability that each draft is accepted if all before it were, [..., drafts], with a prior."""
    return (counts[..., 1, :] + PRIOR_WEIGHT * before) / (counts[..., 0, :] + PRIOR_WEIGHT)


def expected_tokens(rates: np.ndarray) -> np.ndarray:
    """Expected tokens of a step with 0, 1, … drafts, [..., drafts + 1], from the rates, [..., drafts]."""
    tokens = np.ones((*rates.shape[:-1], rates.shape[-1] + 1))
    tokens[..., 1:] += np.cumsum(np.cumprod(rates, axis=-1), axis=-1)
    return tokens


class StepTimes:
    """Seconds of one dispatch of each program that has been timed.

    If the program in use takes longer than before, the machine or the texts have probably changed. So its
    changes scale the times of all programs. The times of the others only correct their ratio to it.
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


class Slots(NamedTuple):
    """What the choice needs to know about slots: one value for each in every attribute.

    Attributes:
      counts: its request's, as of `fade_in`.
      limits: the number of drafts its request asked for; None takes the dispatch's K.
      is_whole: whether the drafter has cached all of its rows; a slot that lacks some gets no drafts.
      missing_rows: rows to read again before the drafter has all of them. This and the next are read only if
        a slot is not whole.
      expected_tokens: tokens that it is expected to need still.
    """

    counts: Sequence[np.ndarray]
    limits: Sequence[int | None]
    is_whole: Sequence[bool]
    missing_rows: Sequence[int] = ()
    expected_tokens: Sequence[int] = ()

    def lacking(self) -> list[int]:
        """The indices of the slots that would take the dispatch's K, but are not whole."""
        return [
            i
            for i, (limit, is_whole) in enumerate(zip(self.limits, self.is_whole, strict=True))
            if limit is None and not is_whole
        ]


class DraftChoice:
    """Chooses K.

    Attributes:
      times: the programs' times.
      counts: of all requests together, the prior of each single one; as of `fade_in`.
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
        self.counts = self.new_counts()
        self.to_compare: list[Key] = []
        self._in_use: dict[tuple[int, int], int] = {}
        self._budget = 0.0
        self._waited = 0
        self._tries = 0
        self._trial = (0, 0)  # K, and the dispatches left

    def forget_acceptance(self) -> None:
        """Forgets what was accepted, because the weights have changed; times stay."""
        self.counts, self._trial = self.new_counts(), (0, 0)

    def new_counts(self) -> np.ndarray:
        """The counts of a new request."""
        return np.zeros((2, self.drafts))

    def rates(self) -> np.ndarray:
        """The rate at which each draft is accepted, over all requests."""
        # A draft that was seldom tried is taken to be accepted as often as the one before it.
        rate, every = PRIOR_RATE, []
        for tries, passes in self.counts.T.tolist():
            rate = (passes + PRIOR_WEIGHT * rate) / (tries + PRIOR_WEIGHT)
            every.append(rate)
        return np.array(every)

    def add_steps(self, counts: Sequence[np.ndarray], limits: np.ndarray, accepted: np.ndarray) -> None:
        """Counts the drafts of a dispatch, in the counts of n requests and in the engine's.

        A draft that was not proposed counts as rejected.

        Args:
          counts: of each request, changed in place.
          limits: i[n], how many drafts each could have.
          accepted: i[steps, n], how many were accepted; -1 for a request that did not take part in a step.
        """
        draft = np.arange(self.drafts)
        tried = (draft <= accepted[..., None]) & (draft < limits[:, None])
        tries, passes = tried.sum(axis=0), (tried & (draft < accepted[..., None])).sum(axis=0)
        every = np.array(counts)
        fade_in(every, tries, passes, MEMORY)
        for of_request, new in zip(counts, every, strict=True):
            of_request[:] = new
        fade_in(self.counts, tries.sum(axis=0), passes.sum(axis=0), ENGINE_MEMORY)

    def add_time(self, key: Key, seconds: float) -> None:
        """Adds the time of a dispatch that served requests."""
        self._budget = min(self._budget + TRIAL_SHARE * seconds, 100 * seconds)
        self.times.add(key, seconds, in_use=self._in_use.get(key[:2], self.drafts) == key[2])

    def choose(
        self, slots: Slots, keys: Mapping[int, Key], row_seconds: float | None
    ) -> tuple[int, list[int]]:
        """K for these slots, and the indices of those to read again so that they can get drafts.

        Args:
          keys: the programs that may run, by their K; the largest K is always among them.
          row_seconds: time to read one row of a prompt; None if it is not known yet.
        """
        most = max(keys)
        least = max(filter(None, slots.limits), default=0)
        seconds = {
            k: self.times.seconds[key] for k, key in keys.items() if k >= least and key in self.times.seconds
        }
        if most not in seconds:
            return most, []
        expected = expected_tokens(rates(np.array(slots.counts), self.rates()))
        takes_k = np.array([limit is None for limit in slots.limits])
        is_whole = np.array(slots.is_whole)
        fixed = expected[np.arange(len(expected)), [limit or 0 for limit in slots.limits]]

        def tokens(can_draft: np.ndarray) -> np.ndarray:
            """Expected tokens of a dispatch with 0, 1, … drafts for the slots that can draft."""
            drafting = takes_k & can_draft
            return self.steps * (expected[drafting].sum(axis=0) + fixed[~drafting].sum())

        of_k = tokens(is_whole).tolist()
        speeds = {k: of_k[k] / seconds[k] for k in seconds}
        group = keys[most][:2]
        best = max(speeds, key=speeds.__getitem__)
        now = self._in_use.get(group, most)
        if now not in speeds or speeds[best] > speeds[now] * (1 + MARGIN):
            now = best
        if not least:
            self._in_use[group] = now
        if not is_whole.all():
            reread = self._worth_reading(slots, seconds, speeds[now], now, tokens, row_seconds)
            if reread:
                return now, reread
        return self._try(slots, keys, seconds, speeds, now, row_seconds)

    def _worth_reading(
        self,
        slots: Slots,
        seconds: Mapping[int, float],
        speed_now: float,
        now: int,
        tokens: Callable[[np.ndarray], np.ndarray],
        row_seconds: float | None,
    ) -> list[int]:
        """All slots that lack rows of the drafter's, if drafting for them pays for reading these rows."""
        missing, left = slots.missing_rows, slots.expected_tokens
        lacking = {i for i in slots.lacking() if missing[i] <= left[i]}
        if not lacking or row_seconds is None or not any(seconds):
            return []
        price = seconds[now] + row_seconds * sum(missing[i] for i in lacking)
        can_draft = np.array([is_whole or i in lacking for i, is_whole in enumerate(slots.is_whole)])
        of_k = tokens(can_draft).tolist()
        best = max(of_k[k] / seconds[k] for k in seconds if k)
        pays = sum(left) / best + price < sum(left) / speed_now * (1 - MARGIN)
        return sorted(lacking) if pays else []

    def _try(
        self,
        slots: Slots,
        keys: Mapping[int, Key],
        seconds: Mapping[int, float],
        speeds: Mapping[int, float],
        now: int,
        row_seconds: float | None,
    ) -> tuple[int, list[int]]:
        """K in use, or a neighbouring K for a few dispatches where the budget allows a trial."""
        k, left = self._trial
        if left and k in speeds:
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
        loss = max(seconds[k] - self.steps * len(slots.limits) / speeds[now], 0.02 * seconds[k])
        # and at most twice the loss that the estimated rates give.
        loss = min(loss, max(seconds[k] * (1 - speeds[k] / speeds[now]), 0.02 * seconds[k]) * 2)
        length = min(max(int(self._budget / loss / 2), BURST), 4 * BURST)
        price, reread = length * loss, []
        lacking = slots.lacking()
        if not now and lacking and len(lacking) == slots.limits.count(None):
            if row_seconds is None:
                return now, []
            cheapest = min(lacking, key=lambda i: slots.missing_rows[i] - slots.expected_tokens[i])
            reread = [cheapest]
            price += seconds[now] + row_seconds * slots.missing_rows[cheapest]
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
