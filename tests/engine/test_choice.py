"""The choice of K alone: a pretended machine with a clock of its own."""

import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.engine.device.plan import Size
from jaxspec.engine.host.choice import DraftChoice, Slots
from jaxspec.engine.rounds import adaptive_k, preparation
from jaxspec.engine.rounds.adaptive_k import AdaptiveK
from jaxspec.sampling import SamplingMode

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
        self.choice = DraftChoice(DRAFTS, 1)
        for k, key in self.keys.items():
            self.choice.times.seconds[key] = statistics.median(self.takes(k) for _ in range(10))
        self.slots = [self.new() for _ in range(slots)]
        for slot in self.slots:
            slot["done"] = self.rng.randrange(400)
        self.seen, self.time, self.tokens = None, 0.0, 0
        self.counts = dict.fromkeys(CHOICES, 0)

    def new(self):
        return {"done": 0, "missing": None, "away": False}

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
            [None] * len(here),
            [None if slot["missing"] is None else slot["done"] - slot["missing"] for slot in here],
            [min(slot["done"], 400 - slot["done"]) for slot in here],
        )
        k, again = self.choice.choose(views, self.keys, self.row_seconds)
        self.counts[k] += 1
        taken = self.takes(k)
        self.time += taken
        if self.seen:
            last, took, limits, accepted = self.seen
            self.choice.times.add(self.keys[last], took)
            self.choice.add_steps(np.array(limits), np.array([accepted]))
        self.seen = k, taken, [], []
        for i in again:
            here[i]["away"] = True
        for slot in here:
            limit = k if slot["missing"] is None else 0
            accepted = 0
            while accepted < limit and self.rng.random() < self.chance:
                accepted += 1
            self.seen[2].append(limit)
            self.seen[3].append(accepted)
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
        for i, (slots, dispatches) in enumerate([(1, 1500), (8, 800), (128, 300)])
        for j, cost in enumerate(COSTS)
    ],
)
def test_never_much_slower_than_plain_decoding_or_the_best_k(slots, dispatches, cost, drafter_has_rows):
    for length in (1.0, 1.2, 2.0, 3.0, 5.0):
        machine = Machine(slots, length, COSTS[cost], drafter_has_rows=drafter_has_rows)
        speed = machine.speed(dispatches)
        assert speed > 0.98 * machine.fixed(0), length
        assert speed > 0.97 * max(map(machine.fixed, CHOICES)), length


@pytest.mark.parametrize(("slots", "drafter_has_rows"), [(1, False), (1, True), (8, True)])
def test_drafts_that_became_better_are_found(slots, drafter_has_rows):
    machine = Machine(slots, 1.0, COSTS["flat"], drafter_has_rows=drafter_has_rows)
    machine.speed(1000)
    assert machine.counts[0] > 500
    machine.chance = chance_for(4.0)
    for _ in range(20_000):
        if machine.counts[4] > 10:
            break
        machine.dispatch()
    assert machine.speed(400) > 0.97 * max(map(machine.fixed, CHOICES))


def choice_of(counts):
    """A choice that has counted these tries and passes; dispatches take longer by 10 % for each draft."""
    choice = DraftChoice(DRAFTS, 1)
    keys = {k: (4, 0, k) for k in CHOICES}
    choice.times.seconds = {key: 1 + 0.1 * k for k, key in keys.items()}
    choice.counts[:] = np.array(counts)[:, None]
    return lambda slots: choice.choose(slots, keys, 0.001)


@pytest.mark.parametrize(
    ("counts", "missing", "left", "expected"),
    [
        # Nothing is known: drafts are made where they can be, and nothing is read for them.
        ((0, 0), [None, None], [9, 9], (4, [])),
        ((0, 0), [None, *[9] * 11], [500] * 12, (4, [])),
        ((90, 40), [None, *[600] * 11], [500] * 12, (0, [])),
        ((0, 0), [9, 9], [500, 500], (0, [])),
        # They are good: who has enough left is read again.
        ((90, 80), [9, 9], [500, 500], (0, [0, 1])),
        ((90, 80), [9, 600], [500, 500], (0, [0])),
        ((90, 80), [9, 9], [8, 8], (0, [])),
        # They are bad.
        ((90, 2), [None, 9], [500, 500], (0, [])),
    ],
)
def test_rows_are_read_again_if_it_pays_for_sure(counts, missing, left, expected):
    assert choice_of(counts)(Slots([None] * len(missing), missing, left)) == expected


def test_a_request_that_asks_for_drafts_gets_them():
    slots = Slots([3, None], [None, None], [9, 9])
    assert choice_of((90, 0))(slots) == (3, [])
    assert choice_of((90, 0))(Slots([0, None], [None, None], [9, 9])) == (0, [])


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("most", [4, 7, 16])
def test_no_k_without_a_program_is_much_better_than_those_with_one(cost, most):
    choices = [most, *preparation._fewer_drafts(most)]
    for slots in (1, 4, 64):
        for chance in np.linspace(0, 0.95, 39):
            speeds = [tokens_a_step(chance, k) / COSTS[cost](slots, k) for k in range(most + 1)]
            assert max(speeds[k] for k in choices) > 0.98 * max(speeds)


@pytest.fixture
def timed(monkeypatch):
    """Adaptive K over a program of which S = 8 steps take 0.8 seconds, and a function that records a dispatch
    of so many seconds and returns what S steps are known to take then."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(adaptive_k, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    programs = SimpleNamespace(num_uncompiled=0)
    config = SimpleNamespace(steps_per_dispatch=8)
    nothing = dict.fromkeys(("need_for", "run_alone", "times_file"))
    adaptive = AdaptiveK(programs, None, config, drafts=2, **nothing)
    size = Size(1, 0, SamplingMode.GREEDY, 3)
    adaptive.choice.times.seconds[adaptive_k._key(size)] = 0.8

    def record(seconds, steps=8, of=size):
        clock.now += seconds
        adaptive.record(SimpleNamespace(steps=steps, decodes=False), None, of)
        return adaptive.choice.times.seconds[adaptive_k._key(size)]

    return adaptive, record


def test_the_time_of_a_dispatch_is_that_of_its_steps(timed):
    _, record = timed
    record(9.0, of=None)
    for steps in (8, 2, 1):
        assert record(0.1 * steps, steps) == pytest.approx(0.8)
    assert record(0.4, steps=2) > 0.8


def test_a_pause_is_no_time_of_a_dispatch(timed):
    adaptive, record = timed
    assert record(9.0) == 0.8  # nothing was read before
    for _ in range(8):
        adaptive.time_between_rounds()
    assert record(9.0) == 0.8  # others may have been timed meanwhile
    assert record(0.8) == pytest.approx(0.8)


def test_steps_that_a_slot_took_no_part_in_are_no_tries():
    config = SimpleNamespace(steps_per_dispatch=2)
    nothing = dict.fromkeys(("need_for", "run_alone", "times_file"))
    adaptive = AdaptiveK(None, None, config, drafts=2, **nothing)
    dispatch = SimpleNamespace(steps=2, decodes=True, limits=[2, 1], batch=[None] * 2)
    # The first slot accepts two drafts and ends; the second has one draft a step. A third is not used.
    outcome = SimpleNamespace(num_tokens=[[3, 1, 0], [0, 2, 0]], accepted=[[2, 0, 0], [0, 1, 0]])
    adaptive.record(dispatch, outcome, None)
    assert adaptive.choice.counts.tolist() == [[3, 1], [2, 1]]
