"""Chooses K for every dispatch from the times of programs and the acceptance of drafts, on the host.

A dispatch has one K, and every draft costs each of its slots a row. So K depends on how many slots decode and
on what they accept together: the K with the most expected tokens per second is taken. Drafts that have not
been tried for long are forgotten, and unknown drafts are taken to be accepted. So they are tried again, for
about `PRIOR_WEIGHT / PATIENCE` of the time.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

Key = tuple[int, int, int]
"""A program: its slots, a number for its sampling mode and what it reports, its K."""

MARGIN = 0.01
"""How much better, as a share, another K must be to replace the one in use."""
MEMORY = 512
"""The tries of a draft after which an earlier one counts 1/e."""
PATIENCE = 1024
"""The steps without a try after which a draft's tries count 1/e."""
PRIOR_WEIGHT = 4.0
"""Tries that the prior acceptance rate counts for. Where a draft costs less than `PRIOR_WEIGHT / MEMORY` of a
step, it may be tried for ever."""
PRIOR_RATE = 0.98
"""Prior acceptance rate of the first draft; that of each later draft is the rate of the draft before it."""
EVIDENCE = 32
"""Tries of the first draft after which its rate is known well enough."""


class StepTimes:
    """Seconds of one dispatch of each program that has been timed."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}

    @classmethod
    def load(cls, path: Path | None) -> "StepTimes":
        """The times that an earlier process saved; none if the file is missing or malformed."""
        times = cls()
        with suppress(OSError, ValueError, TypeError):
            for slots, mode, drafts, seconds in json.loads(path.read_text("utf-8")) if path else ():
                if math.isfinite(seconds) and seconds > 0:
                    times.seconds[int(slots), int(mode), int(drafts)] = float(seconds)
        return times

    def save(self, path: Path) -> None:
        """Replaces the file atomically. If it cannot be written, the next process measures again."""
        rows = [[*key, seconds] for key, seconds in self.seconds.items()]
        with suppress(OSError):
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(rows), "utf-8")
            partial.replace(path)

    def add(self, key: Key, seconds: float) -> None:
        """Corrects a program's time, if it has one, by that of a dispatch that served requests.

        If it takes longer than before, the machine or the texts have probably changed. So the times of all
        programs are corrected, and its own a little more.
        """
        if key not in self.seconds:
            return
        # The process may have been paused.
        error = min(max(math.log(seconds / self.seconds[key]), -0.5), 0.5)
        for every in self.seconds:
            self.seconds[every] *= math.exp(0.02 * error)
        self.seconds[key] *= math.exp(0.01 * error)


class Slots(NamedTuple):
    """What the choice needs to know about slots: one value for each in every attribute.

    Attributes:
      limits: the number of drafts its request asked for; None takes the dispatch's K.
      missing: rows to read again before the drafter has all of them; None if it has. A slot that lacks some
        gets no drafts.
      left: tokens that it is expected to need still.
    """

    limits: Sequence[int | None]
    missing: Sequence[int | None]
    left: Sequence[int]


class DraftChoice:
    """Chooses K.

    Attributes:
      times: the programs' times.
      counts: f64[2, drafts], how often each draft was tried, and how often it was accepted; fading.
    """

    def __init__(self, drafts: int, steps: int, times: StepTimes | None = None):
        """Args:
        drafts: the largest K.
        steps: S, engine steps of a dispatch.
        times: measured earlier; None starts without any.
        """
        self.times = times or StepTimes()
        self.counts = np.zeros((2, drafts))
        self._steps, self._in_use = steps, drafts

    def forget_acceptance(self) -> None:
        """Forgets what was accepted, because the weights have changed; times stay."""
        self.counts[:] = 0

    def expected_tokens(self, prior: float = PRIOR_RATE) -> list[float]:
        """Expected tokens of a step with 0, 1, … drafts, if `prior` is the prior rate of the first."""
        tokens, rate, product = [1.0], prior, 1.0
        for tries, passes in self.counts.T.tolist():
            rate = (passes + PRIOR_WEIGHT * rate) / (tries + PRIOR_WEIGHT)
            product *= rate
            tokens.append(tokens[-1] + product)
        return tokens

    def add_steps(self, limits: np.ndarray, accepted: np.ndarray) -> None:
        """Counts the drafts of a dispatch. A draft that was not proposed counts as rejected.

        Args:
          limits: i[n], how many drafts each of its n requests could have.
          accepted: i[steps, n], how many were accepted; -1 for a request that did not take part in a step.
        """
        draft = np.arange(self.counts.shape[1])
        tried = (draft <= accepted[..., None]) & (draft < limits[:, None])
        passed = tried & (draft < accepted[..., None])
        tries = tried.sum(axis=(0, 1))
        self.counts *= np.where(tries, (1 - 1 / MEMORY) ** tries, (1 - 1 / PATIENCE) ** len(accepted))
        self.counts += [tries, passed.sum(axis=(0, 1))]

    def choose(
        self, slots: Slots, keys: Mapping[int, Key], row_seconds: float | None
    ) -> tuple[int, list[int]]:
        """K for these slots, and the indices of those to read again so that they can get drafts.

        Args:
          keys: the programs that may run, by their K; the largest K is always among them.
          row_seconds: time to read one row of a prompt; None if it is not known yet.
        """
        most, least = max(keys), max(filter(None, slots.limits), default=0)
        known = self.times.seconds
        seconds = {k: known[key] for k, key in keys.items() if k >= least and key in known}
        if most not in seconds:
            return most, []
        whole = [limit for limit, missing in zip(slots.limits, slots.missing, strict=True) if missing is None]
        own = [limit for limit in whole if limit is not None]
        lacking = [
            i
            for i, (limit, missing) in enumerate(zip(slots.limits, slots.missing, strict=True))
            if limit is None and missing is not None
        ]

        def speeds(more: Sequence[int], expected: Sequence[float]) -> dict[int, float]:
            """Tokens per second for every K, if the slots `more` could draft, too."""
            drafting = len(whole) - len(own) + len(more)
            rest = len(slots.limits) - drafting - len(own) + sum(expected[limit] for limit in own)
            return {k: self._steps * (drafting * expected[k] + rest) / seconds[k] for k in seconds}

        expected = self.expected_tokens()
        now = self._best(speeds([], expected))
        reread = []
        if lacking and row_seconds is not None:
            # To read rows again must pay even if unknown drafts are rejected.
            cautious = self.expected_tokens(prior=0.0)
            some = [i for i in lacking if (slots.missing[i] or 0) <= slots.left[i]]
            without, after = (sum(slots.left) / max(speeds(i, cautious).values()) for i in ([], some))
            price = seconds[now] + row_seconds * sum(slots.missing[i] or 0 for i in some)
            if after + price < without * (1 - MARGIN):
                reread = some
        if lacking and not reread and len(whole) > len(own) and self.counts[0, 0] < EVIDENCE:
            # Few slots can draft. They show whether it would pay for all.
            now = self._best(speeds(lacking, expected))
        if not least:
            self._in_use = now
        return now, reread

    def _best(self, speeds: Mapping[int, float]) -> int:
        """The fastest K, or the one in use if that is nearly as fast."""
        best = max(speeds, key=speeds.__getitem__)
        is_near = speeds.get(self._in_use, 0.0) * (1 + MARGIN) >= speeds[best]
        return self._in_use if is_near else best
