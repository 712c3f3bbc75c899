"""The scheduler alone: a pretended device answers its plans."""

import random
from collections import Counter
from zlib import crc32

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.engine.host.pages import PagePool
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Choice, Result, Scheduler
from jaxspec.engine.host.scoring import Scoring
from jaxspec.sampling import Logprobs, SamplingParams

FIRST = Result([7], [(0, 0)], False, False)
"""The token after a prompt."""


def make_request(prompt: int | list[int], max_new_tokens: int) -> Request:
    return Request(
        prompt=list(range(prompt)) if isinstance(prompt, int) else prompt,
        params=SamplingParams(max_new_tokens=max_new_tokens),
        max_new_tokens=max_new_tokens,
        stop_tokens=(),
        seed=0,
        tokenizer=None,
    )


def make_scheduler(**changes) -> Scheduler:
    sizes = {
        "batch_size": 3,
        "pages": PagePool(num_pages=12, page_size=4),
        "steps": 2,
        "tokens_per_step": 3,
        "chunk_size": 5,
        "max_chunks": 2,
    }
    return Scheduler(**{**sizes, **changes})


class Device:
    """Runs plans one round late, as the engine does, and checks each against what a device needs.

    It has slots of its own, and a row of a page holds what the last one to write it computed: the texts that
    the target's row and the drafter's came from, the latter with the token after it. Every row checks that
    all rows it may see were computed from the text it belongs to, whoever wrote them.

    `answer` gives the text's next token, and so what a lone run answers.

    Attributes:
      kinds: numbers of requests that share no program with those of other numbers; 0 for any not named.
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random):
        self.scheduler, self.rng = scheduler, rng
        self.kinds = {}
        self.slots = {}
        self.rows = {}
        self.begun = {}
        self.num_read = 0
        self.in_flight = []

    def share(self, running, decodes):
        kinds = [self.kinds.get(each.request, 0) for each in running]
        return [each for each, kind in zip(running, kinds, strict=True) if kind == kinds[0]]

    def round(self) -> None:
        plan = self.scheduler.plan(self.share)
        for dispatch in plan:
            self.in_flight.append((dispatch, *self._run(dispatch)))
        ahead = len(plan) if plan else len(self.in_flight) - 1
        while len(self.in_flight) > max(ahead, 0):
            dispatch, *results = self.in_flight.pop(0)
            commit = self.scheduler.commit_scores if dispatch.scores else self.scheduler.commit
            commit(dispatch, *results)

    def _run(self, dispatch):
        scheduler = self.scheduler
        check_pages(scheduler)
        assert len({running.slot for running in dispatch.batch}) == len(dispatch.batch)
        assert dispatch.decodes == any(dispatch.is_decoding)
        most = scheduler.mixed_chunks[-1] if dispatch.decodes and dispatch.chunks else scheduler.max_chunks
        assert len(dispatch.chunks) <= most
        if dispatch.scores:
            assert len({running.request.scoring.layers for running in dispatch.batch}) == 1
            assert set(dispatch.batch) == {chunk.running for chunk in dispatch.chunks}
            scores = np.zeros((len(dispatch.chunks), scheduler.chunk_size), np.float32)
            for chunk, row in zip(dispatch.chunks, scores, strict=True):
                row[: chunk.count] = self._score(chunk)
            return [scores, scores[..., None][..., :0], scores[..., None][..., :0]], []
        assert not any(running.request.scoring for running in dispatch.batch)
        if not (dispatch.decodes and dispatch.chunks):
            assert self.share(dispatch.batch, dispatch.decodes) == dispatch.batch
        for running, is_decoding in zip(dispatch.batch, dispatch.is_decoding, strict=True):
            if not is_decoding:
                self.slots[running.slot] = None
        batch = list(zip(dispatch.batch, dispatch.limits, strict=True))
        of_slots, of_chunks = [Result([], [], False, False) for _ in batch], []
        assert dispatch.steps == 1 or dispatch.decodes
        for step in range(dispatch.steps):
            if dispatch.decodes:
                for i, each in enumerate(batch):
                    of_slots[i] = self._step(of_slots[i], *each, dispatch.drafts)
            if not step:
                of_chunks = [self._read(chunk) for chunk in dispatch.chunks]
        return of_slots, of_chunks

    def _write(self, running, start, text, drafts=True):
        """Writes the rows of a text from `start` on whose next token is known, and a row ahead."""
        for position in range(start, len(text)):
            if position // 4 < len(running.pages):
                row = tuple(text[: position + 1]), tuple(text[: position + 2]) if drafts else None
                self.rows[running.pages[position // 4], position % 4] = row

    def _check(self, running, text, is_whole=False):
        """What is read: of the rows before the last token, all that they were computed from."""
        for position in range(len(text) - 1):
            row = self.rows[running.pages[position // 4], position % 4]
            assert row[0] == tuple(text[: position + 1])
            if is_whole or running.missing_from is None or position < running.missing_from:
                assert row[1] == tuple(text[: position + 2])

    def _begin(self, chunk):
        """Checks a chunk; returns its end."""
        running = chunk.running
        assert 1 <= chunk.count <= self.scheduler.chunk_size
        assert chunk.is_first == (running not in self.begun)
        assert chunk.start == (self.begun.get(running, chunk.start))
        end = self.begun[running] = chunk.start + chunk.count
        self.num_read += chunk.count
        assert chunk.is_last == (end == len(running.tokens))
        return end

    def _score(self, chunk):
        """What is said of the token after each row; the drafter's rows are not written."""
        text, end = chunk.running.tokens, self._begin(chunk)
        self._write(chunk.running, chunk.start, text[:end], drafts=False)
        for position in range(end):
            assert self.rows[chunk.running.pages[position // 4], position % 4][0] == tuple(
                text[: position + 1]
            )
        return [said(text, position) for position in range(chunk.start, end)]

    def _read(self, chunk):
        running, end = chunk.running, self._begin(chunk)
        token = answer(running.tokens) if running.given_token is None else running.given_token
        text = [*running.tokens, token]
        self._write(running, chunk.start, text[: end + 1])
        self._check(running, text[: end + 1])
        if chunk.is_last:
            left = running.remaining - 1
            self.slots[running.slot] = [running, text, left] if left else None
        tokens = [token] if chunk.is_last else []
        return Result(tokens, [(0, 0)] * len(tokens), bool(tokens) and running.remaining == 1, False)

    def _step(self, before, running, limit, drafts):
        """Writes its drafts, of which some stand; the drafter's rows too, unless it decodes plainly."""
        assert limit <= drafts < self.scheduler.tokens_per_step
        slot = self.slots.get(running.slot)
        if slot is None:
            return before
        assert slot[0] is running
        _, text, left = slot
        start = len(text) - 1
        self._check(running, text, is_whole=limit > 0)
        self._write(running, start, [*text, *[-1] * (drafts + 1)])
        tokens = []
        for _ in range(min(left, self.rng.randint(1, limit + 1))):
            tokens.append(answer([*text, *tokens]))
        text += tokens
        # Rows of tokens that stand have pages, and the drafter's are made again.
        self._write(running, start, text, drafts > 0)
        self._check(running, text)
        slot[2] = left - len(tokens)
        if not slot[2]:
            self.slots[running.slot] = None
        verified = [*before.verified, (limit, len(tokens) - 1)]
        return Result([*before.tokens, *tokens], verified, not slot[2], False)


def answer(text) -> int:
    """The token after a text: texts that part soon meet again, so that many pages differ in one token."""
    return sum(text) % 3


def said(text, position) -> float:
    """What is said of the token after a position of a text: a number that only this beginning has."""
    return crc32(bytes(text[: position + 2])) % 2**24


def check_pages(scheduler) -> None:
    """Every page has the users that it should, and is free or kept otherwise, once."""
    pool = scheduler.pages
    users = Counter(page for running in scheduler.running for page in running.pages)
    assert users == pool._users
    assert sorted([*users, *pool._free, *pool._unused]) == list(range(1, pool.num_pages + 1))
    assert {page: key for key, page in pool._kept.items()} == pool._keys
    assert {page for page in pool._keys if page not in users} == set(pool._unused)
    assert pool.notes.keys() <= pool._keys.keys()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 1), st.integers(0, 30)),
        min_size=1,
        max_size=25,
    ),
    pages=st.integers(11, 30),
    max_chunks=st.integers(1, 4),
    mixed=st.sampled_from([(), (1,), (1, 2), (2,)]),
    between=st.integers(1, 8),
    steps=st.integers(1, 4),
    adapts=st.booleans(),
    aborted=st.sets(st.integers(0, 24)),
    scored=st.dictionaries(st.integers(0, 24), st.sampled_from([(), (), (1,), (0, 2)])),
    lost=st.booleans(),
    apart=st.integers(1, 3),
    chosen=st.lists(st.integers(0, 2), max_size=6),
    seed=st.integers(0, 2**16),
)
def test_whatever_arrives_ends_with_its_tokens(
    sizes, pages, max_chunks, mixed, between, steps, adapts, aborted, scored, lost, apart, chosen, seed
):
    """However few pages there are, none is leaked, and what anybody reads belongs to its own text.

    K is the largest, or one of those `chosen`, if any; who lacks rows of the drafter's is sometimes
    read again.

    Prompts are one text that a token parts somewhere, or what an earlier request read and answered. Some are
    only scored, which may be aborted and put back like all others. Those of `apart` kinds share no program.
    """
    rng = random.Random(seed)
    scheduler = make_scheduler(
        pages=PagePool(pages, 4),
        max_chunks=max_chunks,
        mixed_chunks=mixed,
        chunks_between=between,
        steps=steps,
        adapts_steps=adapts,
    )
    if chosen:
        scheduler.choose = lambda decoding: Choice(
            rng.choice(chosen), [r for r in decoding if r.missing_from is not None and rng.random() < 0.2]
        )
    device = Device(scheduler, rng)
    requests = []
    for length, new, priority, parting in sizes:
        prompt = [0] * length
        prompt[parting:] = [1] * len(prompt[parting:])
        requests.append(make_request(prompt, new))
        requests[-1].priority = priority
        device.kinds[requests[-1]] = len(requests) % apart
        requests[-1].num_drafts = rng.choice([None, None, None, 0, 1, 2])
    arriving = list(requests)
    for _ in range(3000):
        if arriving and rng.random() < 0.6:
            request = arriving.pop(0)
            before = rng.choice(requests)
            if before.finish_reason and rng.random() < 0.5:
                request.prompt = [*before.prompt, *before.token_ids, 0][: rng.randint(1, 24)]
            layers = scored.get(len(requests) - len(arriving) - 1)
            if layers is not None:
                request.max_new_tokens = 0
                request.scoring = Scoring.of(len(request.prompt), Logprobs.CHOSEN, layers, 0)
            scheduler.add(request)
        device.round()
        if lost and rng.random() < 0.02:
            scheduler.restart()
            device.in_flight.clear()
            device.rows.clear()
        for index in list(aborted):
            if index < len(requests) and rng.random() < 0.1 and requests[index].stage != "new":
                scheduler.abort(requests[index], "why")
                aborted.discard(index)
        check_pages(scheduler)
        keys = [running.request.queue_key for running in scheduler.running]
        assert keys == sorted(keys)
        assert [r.queue_key for r in scheduler.waiting] == sorted(r.queue_key for r in scheduler.waiting)
        if not arriving and not scheduler and not device.in_flight:
            break
    for request in requests:
        assert request.finish_reason in ("length", "aborted")
        text = list(request.prompt)
        for token in request.token_ids:
            assert token == answer(text)
            text.append(token)
        if request.finish_reason == "length":
            assert len(request.token_ids) == request.max_new_tokens
            if request.scoring:
                expected = [said(request.prompt, position) for position in range(len(request.prompt))]
                assert request.scoring.logprobs.tolist() == expected
    assert scheduler.pages.num_free == pages
    assert scheduler.slots == [None] * 3


def test_what_was_said_reaches_who_found_the_pages_though_their_reader_has_ended():
    """It is aborted while its chunks are in flight, and its pages have been found."""
    scheduler = make_scheduler()
    device = Device(scheduler, random.Random(0))
    first, second = (make_request([*range(18), i, i], 1) for i in range(2))
    for request in (first, second):
        request.max_new_tokens, request.scoring = 0, Scoring.of(20, Logprobs.CHOSEN, (), 0)
        scheduler.add(request)
    device.round()
    scheduler.abort(first, "why")
    while scheduler or device.in_flight:
        device.round()
    assert device.num_read == 10 + (20 - 8)
    assert second.scoring.logprobs.tolist() == [said(second.prompt, i) for i in range(20)]


def test_a_head_that_many_share_is_read_once():
    """All are admitted at once, when none of it has been read."""
    for mixed in ((), (1, 2)):
        scheduler = make_scheduler(
            batch_size=9, pages=PagePool(100, 4), chunk_size=4, max_chunks=3, mixed_chunks=mixed
        )
        device = Device(scheduler, random.Random(0))
        if mixed:
            scheduler.add(make_request([2], 60))
            device.round()
        requests = [make_request([*range(20), 30 + i, i], 3) for i in range(8)]
        for request in requests:
            scheduler.add(request)
        before = device.num_read
        while scheduler or device.in_flight:
            device.round()
        # The fifth page is not the others', for the token after it is the first one's own.
        assert [request.cached_tokens for request in requests] == [0] + [16] * 7
        assert device.num_read - before == 22 + 7 * 6


def test_a_turn_finds_all_that_was_read_and_answered_before_it():
    scheduler = make_scheduler()
    device = Device(scheduler, random.Random(3))
    text = [0, 1, 0]
    for found in (0, 8, 20, 28):
        request = make_request([*text, 1, 2], 7)
        scheduler.add(request)
        while scheduler or device.in_flight:
            device.round()
        assert request.cached_tokens == found
        text = [*request.prompt, *request.token_ids]


def test_a_request_whose_logits_are_not_finite_leaves_nothing_that_another_would_find():
    scheduler = make_scheduler()
    for _ in range(2):
        request = make_request(13, 10)
        scheduler.add(request)
        _, last, _ = scheduler.plan()
        scheduler.commit(last, [], [Result([], [], True, True)])
        assert (request.finish_reason, request.cached_tokens) == ("failed", 0)


def test_a_step_whose_logits_are_not_finite_keeps_no_page():
    scheduler = make_scheduler()
    request = make_request(3, 10)
    scheduler.add(request)
    prompt, decode = scheduler.plan()
    scheduler.commit(prompt, [], [FIRST])
    # They complete the first page, and the token after it is known.
    scheduler.commit(decode, [Result([8, 9], [(2, 1)], True, True)], [])
    assert request.finish_reason == "failed"
    following = make_request(9, 1)
    following.prompt[:6] = [*request.prompt, *request.token_ids]
    scheduler.add(following)
    scheduler.plan()
    assert following.cached_tokens == 0


def test_requests_start_in_the_order_of_the_queue_and_wait_for_pages():
    scheduler = make_scheduler()
    large, larger, small = make_request(24, 16), make_request(24, 20), make_request(1, 1)
    for request in (large, larger, small):
        scheduler.add(request)
    scheduler.plan()
    # The small one would fit beside the first, but the queue is served in order.
    assert [running and running.request for running in scheduler.slots] == [large, None, None]


def test_what_a_request_may_never_use_is_not_reserved():
    scheduler = make_scheduler()
    for _ in range(3):
        scheduler.add(make_request(4, 40))  # 11 pages each of 12, were they reserved
    scheduler.plan()
    assert len(scheduler.running) == 3
    assert scheduler.num_preempted == 0


def test_without_pages_the_last_of_the_order_gives_its_own_back_and_goes_on_later():
    scheduler = make_scheduler()
    device = Device(scheduler, random.Random(1))
    requests = [make_request(4, 40) for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(100):
        if not scheduler.num_preempted:
            device.round()
    assert scheduler.waiting == [requests[2]]
    for _ in range(500):
        device.round()
    assert [len(request.token_ids) for request in requests] == [40] * 3


def test_a_long_prompt_does_not_hold_up_slots_that_decode():
    for mixed in ((), (1,)):
        scheduler = make_scheduler(chunks_between=1, mixed_chunks=mixed)
        first = make_request(3, 10)
        scheduler.add(first)
        scheduler.plan()
        scheduler.add(make_request(20, 5))
        plan = scheduler.plan()
        chunks = [chunk.count for dispatch in plan for chunk in dispatch.chunks]
        assert chunks == [5]
        assert plan[-1].batch[0].request is first
        assert plan[-1].decodes


def test_requests_that_share_no_program_take_no_turns_at_decoding():
    scheduler = make_scheduler()
    device = Device(scheduler, random.Random(0))
    requests = [make_request(3, 9) for _ in range(3)]
    device.kinds = {requests[1]: 1}
    for request in requests:
        scheduler.add(request)
    reads, reads_apart, *decode = scheduler.plan(device.share)
    batches = [[running.request for running in each.batch] for each in (reads, reads_apart, *decode)]
    assert [each.decodes for each in (reads, reads_apart, *decode)] == [False, False, True, True]
    assert batches == [[requests[0], requests[2]], [requests[1]]] * 2


def test_a_dispatch_has_fewer_steps_for_more_slots_and_one_while_a_prompt_is_read():
    for adapts, expected in ((False, [8, 8, 8, 8, 8]), (True, [8, 7, 1, 1, 6])):
        scheduler = make_scheduler(
            steps=8, adapts_steps=adapts, chunks_between=1, pages=PagePool(40, 4), tokens_per_step=1
        )
        taken = []
        for prompt in (3, 3, 12):
            scheduler.add(make_request(prompt, 40))
            taken.append(scheduler.plan()[-1].steps)
        taken += [scheduler.plan()[-1].steps for _ in range(2)]
        assert taken == expected


def test_nothing_is_dispatched_once_what_is_in_flight_must_finish_everything():
    scheduler = make_scheduler()
    scheduler.add(make_request(3, 3))
    assert scheduler.plan()[-1].decodes  # the first token, and at least two of two steps
    assert not scheduler.plan()


def test_a_prompt_that_ends_beside_others_decodes_with_them_at_once():
    scheduler = make_scheduler(mixed_chunks=(1, 2), steps=4, pages=PagePool(40, 4))
    scheduler.add(make_request(3, 30))
    scheduler.plan()
    scheduler.add(make_request(6, 30))
    (dispatch,) = scheduler.plan()
    assert [(chunk.start, chunk.count) for chunk in dispatch.chunks] == [(0, 5), (5, 1)]
    assert dispatch.is_decoding == [True, False]
    # The first token of an answer, and one of each later step.
    assert dispatch.min_tokens == [4, 1 + 3]


def begin_beside_plain_decoding(num_drafts: int | None):
    """A request of 6 tokens, and the dispatch that reads it while another decodes without drafts."""
    scheduler = make_scheduler(
        mixed_chunks=(1, 2), steps=4, pages=PagePool(40, 4), choose=lambda decoding: Choice(0)
    )
    scheduler.add(make_request(3, 30))
    scheduler.plan()
    scheduler.add(make_request(6, 30))
    scheduler.waiting[0].num_drafts = num_drafts
    (dispatch,) = scheduler.plan()
    return scheduler.running[1], dispatch


def test_a_prompt_that_ends_beside_plain_decoding_lacks_the_drafters_rows_from_its_end_on():
    running, dispatch = begin_beside_plain_decoding(None)
    assert dispatch.limits == [0, 0]
    assert running.missing_from == 6


def test_a_request_with_its_own_number_of_drafts_has_it_from_the_first_step_on():
    running, dispatch = begin_beside_plain_decoding(2)
    assert (dispatch.drafts, dispatch.limits) == (2, [0, 2])
    assert running.missing_from is None


def test_with_more_to_read_the_next_step_reads_on():
    scheduler = make_scheduler(mixed_chunks=(1, 2), steps=4, pages=PagePool(40, 4))
    scheduler.add(make_request(3, 30))
    scheduler.plan()
    scheduler.add(make_request(12, 30))
    (mixed,) = scheduler.plan()
    assert len(mixed.chunks) == 2
    assert mixed.decodes


def test_a_step_reads_what_fills_a_program_and_the_next_one_the_rest():
    for steps, expected in (
        (1, [[(1, 5)] * 4, [(1, 5), (2, 5)], [(2, 1)], []]),
        (2, [[(1, 5)] * 4, [(1, 5), (2, 5), (2, 1)], [], []]),  # the host is slow
    ):
        scheduler = make_scheduler(mixed_chunks=(1, 2, 4), steps=steps, pages=PagePool(40, 4))
        scheduler.add(make_request(3, 30))
        scheduler.plan()
        scheduler.add(make_request([5] * 25, 30))
        scheduler.add(make_request([6] * 6, 30))
        read = [[(c.running.slot, c.count) for c in scheduler.plan()[0].chunks] for _ in range(4)]
        assert read == expected


def test_pieces_of_one_prompt_share_a_step():
    scheduler = make_scheduler(max_chunks=4)
    scheduler.add(make_request(13, 3))
    scheduler.add(make_request([5] * 9, 3))
    plan = scheduler.plan()
    chunks = [[(c.running.slot, c.start, c.count, c.is_last) for c in d.chunks] for d in plan if d.chunks]
    assert chunks == [
        [(0, 0, 5, False), (0, 5, 5, False), (0, 10, 3, True), (1, 0, 5, False)],
        [(1, 5, 4, True)],
    ]


def test_a_prompt_is_read_before_those_that_came_later():
    """It lies in the last slot, the first one decodes, and the one between is refilled all the time."""
    scheduler = make_scheduler(chunks_between=1, max_chunks=1, pages=PagePool(100, 4), prefix_caching=False)
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
    requests = [make_request(3, 10) for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    prompts, decode = scheduler.plan()
    scheduler.commit(prompts, [], [FIRST] * 2)
    scheduler.commit(decode, [Result([8, 9], [(2, 1)], False, False)], [])
    scheduler.restart()
    assert scheduler.pages.num_free == 12
    assert scheduler.waiting == requests
    chunk = scheduler.plan()[0].chunks[0]
    again = chunk.running
    assert (again.request, again.tokens, again.given_token) == (requests[0], [0, 1, 2, 7, 8], 9)
    assert again.remaining == 8  # of ten, the given one included
    assert not chunk.samples


def test_larger_priorities_are_served_first():
    scheduler = make_scheduler(batch_size=1)
    requests = [make_request(3, 10) for _ in range(4)]
    for request, priority in zip(requests, (0, 0, 5, 1), strict=True):
        request.priority = priority
        scheduler.add(request)
    assert [requests.index(request) for request in scheduler.waiting] == [2, 3, 0, 1]


def test_what_should_have_ended_is_aborted_wherever_it_is():
    scheduler = make_scheduler(batch_size=2)
    requests = [make_request(3, 10) for _ in range(4)]
    for request, deadline in zip(requests, (10.0, 11.0, 10.0, None), strict=True):
        request.deadline = deadline
        scheduler.add(request)
    scheduler.plan()
    scheduler.expire(10.5)
    assert [request.status for request in requests] == ["aborted", "running", "aborted", "queued"]
    assert [running.request for running in scheduler.running] == [requests[1]]
    assert scheduler.waiting == [requests[3]]


def test_a_waiting_request_can_be_cancelled():
    scheduler = make_scheduler()
    request = make_request(3, 10)
    scheduler.add(request)
    scheduler.abort(request, "why")
    assert not scheduler.plan()


def test_what_a_dispatch_did_for_a_slot_that_was_given_up_is_of_no_use():
    scheduler = make_scheduler()
    request, following = make_request(3, 10), make_request(2, 4)
    scheduler.add(request)
    prompts, decode = scheduler.plan()
    scheduler.abort(request, "why")
    assert scheduler.pages.num_free == 12
    scheduler.add(following)
    scheduler.plan()
    assert scheduler.slots[0].request is following
    scheduler.commit(prompts, [], [FIRST])
    scheduler.commit(decode, [Result([8], [(2, 0)], False, False)], [])
    assert request.token_ids == following.token_ids == []
