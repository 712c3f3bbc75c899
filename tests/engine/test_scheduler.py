"""The scheduler alone: a pretended device answers its plans."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Running, Scheduler, SlotStep
from jaxspec.sampling import SamplingParams


def make_request(prompt_length: int, max_new_tokens: int) -> Request:
    return Request(
        prompt=list(range(prompt_length)),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        max_new_tokens=max_new_tokens,
        stop_tokens=(),
        seed=0,
        tokenizer=None,
    )


def make_scheduler(**changes) -> Scheduler:
    sizes = {
        "batch_size": 3,
        "pages": PageAllocator(num_pages=12, page_size=4),
        "prefill_rows": 2,
        "prefill_chunk": 5,
        "steps_per_dispatch": 2,
    }
    return Scheduler(**{**sizes, **changes})


class Device:
    """Runs plans one round late, as the engine does, and checks each against what a device needs."""

    def __init__(self, scheduler: Scheduler, rng: random.Random):
        self.scheduler, self.rng = scheduler, rng
        self.emitted: dict[Request, int] = {}
        self.in_flight = []

    def round(self) -> None:
        plan = self.scheduler.plan()
        self._check(plan)
        if plan:
            self.in_flight.append(self._run(plan))
        if self.in_flight and (len(self.in_flight) > 1 or not plan):
            self._commit(self.in_flight.pop(0))

    def _check(self, plan) -> None:
        owned = [page for running in self.scheduler.slots if running for page in running.pages]
        assert len(set(owned)) == len(owned)
        for group in plan.prefills:
            assert 1 <= len(group) <= self.scheduler.prefill_rows
            assert len({chunk.running.slot for chunk in group}) == len(group)
            assert all(1 <= chunk.count <= self.scheduler.prefill_chunk for chunk in group)
        for running in plan.decodes:
            assert running.is_prefilled
            assert self.scheduler.live[running.slot]

    def _run(self, plan):
        firsts = [chunk for group in plan.prefills for chunk in group if chunk.is_last]
        for chunk in firsts:
            self.emitted[chunk.running.request] = 1
        steps = {}
        for running in plan.decodes:
            rows = []
            for _ in range(self.scheduler.steps_per_dispatch):
                left = running.request.max_new_tokens - self.emitted[running.request]
                count = min(left, self.rng.randint(1, 3))
                self.emitted[running.request] += count
                rows.append(SlotStep([7] * count, 2, max(count - 1, 0), count > 0 and count == left, False))
            steps[running] = rows
        return firsts, steps

    def _commit(self, round_) -> None:
        firsts, steps = round_
        for chunk in firsts:
            request = chunk.running.request
            self.scheduler.commit_first(chunk, 7, done=request.max_new_tokens == 1)
        for running, rows in steps.items():
            self.scheduler.commit_decode(running, rows)


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_all_finish_with_exactly_their_tokens(seed):
    rng = random.Random(seed)
    scheduler = make_scheduler(prefill_budget=rng.choice([1, 8, 512]))
    device = Device(scheduler, rng)
    requests = [make_request(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(25)]
    waiting = list(requests)
    for _ in range(1000):
        if waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop(0))
        device.round()
    assert [len(request.token_ids) for request in requests] == [r.max_new_tokens for r in requests]
    assert all(request.finish_reason == "length" for request in requests)
    assert scheduler.pages.num_free == 12
    assert scheduler.slots == [None] * 3


def test_requests_start_in_the_order_of_the_queue_and_wait_for_pages():
    scheduler = make_scheduler()
    large, larger, small = make_request(8, 16), make_request(12, 20), make_request(1, 1)
    for request in (large, larger, small):
        scheduler.add(request)
    scheduler.plan()
    # The small one would fit beside the first, but the queue is served in order.
    assert [running and running.request for running in scheduler.slots] == [large, None, None]


def test_a_long_prompt_does_not_hold_up_slots_that_decode():
    scheduler = make_scheduler(prefill_budget=5)
    first = make_request(3, 10)
    scheduler.add(first)
    scheduler.plan()
    scheduler.add(make_request(20, 5))
    plan = scheduler.plan()
    assert [chunk.count for group in plan.prefills for chunk in group] == [5]
    assert [running.request for running in plan.decodes] == [first]


def test_a_prompt_is_read_before_those_that_came_later():
    """It lies in the last slot, the first one decodes, and the one between is refilled all the time."""
    scheduler = make_scheduler(prefill_budget=1, prefill_rows=1, pages=PageAllocator(100, 4))
    device = Device(scheduler, random.Random(0))
    decoding, short, long = make_request(1, 100), make_request(1, 1), make_request(20, 4)
    scheduler.add(decoding)
    device.round()
    for request in (short, long):
        scheduler.add(request)
    for _ in range(7):
        scheduler.add(make_request(40, 1))
        device.round()
    assert len(decoding.token_ids) < 100
    assert long.token_ids


def test_a_request_that_starts_again_reads_its_answer_too_and_keeps_its_place():
    scheduler = make_scheduler(batch_size=2)
    first, second, third = (make_request(3, 10) for _ in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    plan = scheduler.plan()
    for chunk in plan.prefills[0]:
        scheduler.commit_first(chunk, 7, done=False)
    scheduler.commit_decode(plan.decodes[0], [SlotStep([8, 9], 2, 1, False, False)])
    scheduler.restart()
    assert scheduler.pages.num_free == 12
    assert scheduler.waiting == [first, second, third]
    plan = scheduler.plan()
    again = plan.prefills[0][0].running
    assert (again.request, again.tokens, again.known) == (first, [0, 1, 2, 7, 8], 9)
    assert again.remaining == 8  # of ten, the known one included
    assert not plan.prefills[0][0].samples
    scheduler.commit_first(plan.prefills[0][0], 5, done=False)
    assert first.token_ids == [7, 8, 9]


def test_the_order_of_arrival_holds_for_prompts_and_slots():
    @given(
        st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=30
        ),
        st.integers(1, 3),
        st.integers(0, 2**16),
    )
    @settings(max_examples=60, deadline=None, derandomize=True)
    def check(sizes, prefill_rows, seed):
        scheduler = make_scheduler(prefill_rows=prefill_rows, prefill_budget=4)
        device = Device(scheduler, random.Random(seed))
        requests = [make_request(prompt, new) for prompt, new, _ in sizes]
        for request, (_, _, priority) in zip(requests, sizes, strict=True):
            request.priority = priority
        arriving, admitted, read = list(requests), [], []
        for _ in range(2000):
            if arriving:
                scheduler.add(arriving.pop(0))
            before = set(admitted)
            queue = list(scheduler.waiting)
            device.round()
            now = [running.request for running in scheduler.running if running.request not in before]
            # Whoever was admitted stood at the head of the queue.
            assert set(now) >= set(queue[: len(now)]) or not now
            admitted += now
            read += [r.request for r in scheduler.running if r.is_prefilled and r.request not in read]
            if not arriving and not scheduler:
                break
        assert all(request.finish_reason == "length" for request in requests)

    check()


def test_nothing_is_dispatched_once_what_is_in_flight_must_finish_everything():
    scheduler = make_scheduler()
    scheduler.add(make_request(3, 3))
    assert scheduler.plan().decodes  # the first token, and at least two of two steps
    assert not scheduler.plan()


def test_a_cancelled_request_leaves_its_slot_dead_until_the_next_one_takes_it():
    scheduler = make_scheduler()
    request, following = make_request(3, 10), make_request(2, 4)
    scheduler.add(request)
    scheduler.plan()
    scheduler.abort(request, "why")
    assert scheduler.live == [False, True, True]
    assert scheduler.pages.num_free == 12
    scheduler.add(following)
    scheduler.plan()
    assert scheduler.live[0]
    assert scheduler.slots[0].request is following


class Slots:
    """Which request the device believes to be running in each slot, and who owns the pages it writes."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.active: dict[int, Running] = {}

    def run(self, plan) -> None:
        for chunk in (chunk for group in plan.prefills for chunk in group):
            self.active.pop(chunk.running.slot, None)
            if chunk.is_last:
                self.active[chunk.running.slot] = chunk.running
        if plan.decodes:
            live = self.scheduler.live
            self.active = {slot: running for slot, running in self.active.items() if live[slot]}
            for slot, running in self.active.items():
                assert self.scheduler.slots[slot] is running, "writes into pages that were given back"


@pytest.mark.parametrize("seed", range(40))
def test_a_request_that_the_host_ended_never_writes_again(seed):
    """Cancelled ones and those with a stop string: their pages may already be another's."""
    rng = random.Random(seed)
    scheduler = make_scheduler(prefill_budget=rng.choice([1, 4]), prefill_rows=1)
    slots = Slots(scheduler)
    requests = [make_request(rng.randint(1, 12), 12) for _ in range(60)]
    waiting = list(requests)
    for _ in range(300):
        while waiting and rng.random() < 0.7:
            scheduler.add(waiting.pop(0))
        slots.run(scheduler.plan())
        for running in filter(None, list(scheduler.slots)):
            if running.is_prefilled and rng.random() < 0.3:
                scheduler.abort(running.request, "why")
    assert not waiting
    assert not scheduler.waiting


def test_a_waiting_request_can_be_cancelled():
    scheduler = make_scheduler()
    request = make_request(3, 10)
    scheduler.add(request)
    scheduler.abort(request, "why")
    assert not scheduler.plan()
