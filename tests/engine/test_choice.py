"""The choice of K alone: a pretended machine with a clock of its own."""

import random
import statistics

import numpy as np
import pytest

from jaxspec.engine import core
from jaxspec.engine.host.choice import TIMING_RUNS, DraftChoice, Slots

DRAFTS, CHOICES = 4, (0, 1, 2, 3, 4)
COSTS = {
    "flat": lambda slots, drafts: 1 + 0.03 * drafts + 0.0005 * slots * (drafts + 1),
    "by rows": lambda slots, drafts: 0.5 + 0.1 * slots * (drafts + 1) + 0.1 * drafts,
}
"""Seconds of a dispatch: weights alone, as on a GPU with few slots, or rows, as on a CPU."""
WARM_UP = 400
"""Dispatches after which the bounds hold."""


def tokens_a_step(chance: float, drafts: int) -> float:
    return sum(chance**i for i in range(drafts + 1))


def chance_for(length: float) -> float:
    """The chance of each draft with which a step of all drafts gives so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_step(middle, DRAFTS) < length else (low, middle)
    return high


class Machine:
    """Requests of 400 tokens one after another in every slot; what came out is known a dispatch late."""

    def __init__(self, slots, length, cost, *, drafter_has_rows, seed=0, noise=0.03):
        self.rng = random.Random(seed)
        self.chance, self.cost, self.noise = chance_for(length), cost, noise
        self.drafter_has_rows = drafter_has_rows
        self.row_seconds = cost(slots, 0) / 16
        self.keys = {k: (slots, 0, k) for k in CHOICES}
        self.choice = DraftChoice(DRAFTS, 1, drafter_has_rows=drafter_has_rows)
        for k, key in self.keys.items():
            self.choice.times.add_alone(key, statistics.median(self.takes(k) for _ in range(TIMING_RUNS)))
        self.slots = [self.new() for _ in range(slots)]
        for slot in self.slots:
            slot["done"] = self.rng.randrange(400)
        self.seen, self.time, self.tokens = None, 0.0, 0
        self.counts = dict.fromkeys(CHOICES, 0)

    def new(self):
        return {"counts": self.choice.new_counts(), "done": 0, "missing": None, "away": False}

    def takes(self, k):
        return self.cost(self.keys[k][0], k) * self.rng.lognormvariate(0, self.noise)

    def dispatch(self):
        here = [slot for slot in self.slots if not slot["away"]]
        for slot in self.slots:
            if slot["away"]:
                self.time += self.row_seconds * (slot["done"] - slot["missing"])
                slot |= {"away": False, "missing": None}
        if not here:
            return
        views = Slots(
            [slot["counts"] for slot in here],
            [None] * len(here),
            [slot["missing"] is None for slot in here],
            [0 if slot["missing"] is None else slot["done"] - slot["missing"] for slot in here],
            [min(slot["done"], 400 - slot["done"]) for slot in here],
        )
        k, again = self.choice.choose(views, self.keys, self.row_seconds)
        self.counts[k] += 1
        taken = self.takes(k)
        self.time += taken
        if self.seen:
            last, took, counts, limits, accepted = self.seen
            self.choice.add_time(self.keys[last], took)
            self.choice.add_steps(counts, np.array(limits), np.array([accepted]))
        self.seen = k, taken, [slot["counts"] for slot in here], [], []
        if keys := self.choice.to_compare:
            seconds = [self.takes(key[2]) for key in keys]
            self.time += sum(seconds)
            self.choice.times.compare(keys[0], seconds[0], keys[1], seconds[1])
            keys.clear()
        for i in again:
            here[i]["away"] = True
        for slot in here:
            limit = k if slot["missing"] is None else 0
            accepted = 0
            while accepted < limit and self.rng.random() < self.chance:
                accepted += 1
            self.seen[3].append(limit)
            self.seen[4].append(accepted)
            if not k and self.drafter_has_rows and slot["missing"] is None:
                slot["missing"] = slot["done"]
            slot["done"] += accepted + 1
            self.tokens += accepted + 1
            if slot["done"] >= 400:
                slot |= self.new()

    def speed(self, dispatches):
        """Tokens per second of so many, after the warm-up."""
        for _ in range(WARM_UP):
            self.dispatch()
        self.time, self.tokens = 0.0, 0
        self.counts = dict.fromkeys(CHOICES, 0)
        for _ in range(dispatches):
            self.dispatch()
        return self.tokens / self.time

    def fixed(self, k):
        slots = self.keys[k][0]
        return slots * tokens_a_step(self.chance, k) / self.cost(slots, k)


@pytest.mark.parametrize(
    ("slots", "dispatches", "cost", "drafter_has_rows"),
    [
        (slots, dispatches, cost, (i + j) % 2 == 0)
        for i, (slots, dispatches) in enumerate([(1, 1500), (8, 400), (128, 300)])
        for j, cost in enumerate(COSTS)
    ],
)
def test_never_much_slower_than_plain_decoding_or_the_best_k(slots, dispatches, cost, drafter_has_rows):
    for length in (1.0, 1.2, 2.0, 3.0, 5.0):
        machine = Machine(slots, length, COSTS[cost], drafter_has_rows=drafter_has_rows)
        speed = machine.speed(dispatches)
        assert speed > 0.98 * machine.fixed(0), length
        assert speed > 0.97 * max(map(machine.fixed, CHOICES)), length


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("most", [4, 7, 16])
def test_no_k_without_a_program_is_much_better_than_those_with_one(cost, most):
    choices = [most, *core._fewer_drafts(most)]
    for slots in (1, 4, 64):
        for chance in np.linspace(0, 0.95, 39):
            speeds = [tokens_a_step(chance, k) / COSTS[cost](slots, k) for k in range(most + 1)]
            assert max(speeds[k] for k in choices) > 0.98 * max(speeds)
