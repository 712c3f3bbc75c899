"""Decides which request runs in which slot and what the next dispatch does. Plain Python, no arrays."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, NamedTuple, cast
from weakref import ref

from jaxspec.engine.host.grammars import PlacedGrammar
from jaxspec.engine.host.pages import PagePool, page_keys
from jaxspec.engine.host.request import NOTHING, Reported, Request
from jaxspec.engine.host.scoring import Scoring

_QUEUE_KEY = attrgetter("queue_key")
Share = Callable[[Sequence["Running"], bool], list["Running"]]
"""Says which requests share a dispatch; see `Scheduler.plan`."""


@dataclass(eq=False)
class Running:
    """A request in a slot.

    Attributes:
      request: the request.
      slot: index of its slot.
      pages: the cache pages it uses. Before each dispatch it gets those that the dispatch may write.
      tokens: what is read before it decodes: its prompt and, if it starts again, its answer so far without
        the last token.
      given_token: the last token of that answer; None if the request starts for the first time.
      grammar_state: the state of its grammar's automaton after `tokens`; 0 without a grammar.
      num_kept: how many of its first pages the pool keeps, whether found there or filled by this request.
      num_read: how many of `tokens` were found in the prefix cache or have been planned.
      is_begun: whether any have been planned.
      min_in_flight, max_in_flight: the least and the most tokens that the dispatches in flight emit for it.
      missing_from: the position from which the drafter's rows are missing, because of plain decoding; None
        if none are.
      states_at: the lengths of its text behind which the states of recurrent layers are copied, ascending.
      is_leaving: whether it goes back to the queue, once nothing of it is in flight, so that the drafter's
        missing rows are read.
    """

    request: Request
    slot: int
    pages: list[int]
    tokens: list[int]
    given_token: int | None
    grammar_state: int = 0
    num_kept: int = 0
    num_read: int = 0
    is_begun: bool = False
    min_in_flight: int = 0
    max_in_flight: int = 0
    missing_from: int | None = None
    is_leaving: bool = False
    states_at: Sequence[int] = ()

    @property
    def is_read(self) -> bool:
        """Whether all of `tokens` have been planned."""
        return self.num_read >= len(self.tokens)

    @property
    def remaining(self) -> int:
        """The most tokens that the device may emit after `tokens`, the given one included."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def decodes(self) -> bool:
        """Whether it may need more tokens than the dispatches in flight surely emit."""
        wanted = self.request.max_new_tokens - len(self.request.token_ids) > self.min_in_flight
        return self.is_read and wanted and not self.is_leaving


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of those that a request reads.

    Attributes:
      running: the request in its slot.
      start: index of the first token in `running.tokens`.
      count: the number of tokens, at most C.
      is_first: whether it is the first chunk that is planned; tokens before it were found in the cache.
      is_last: whether nothing is left to read after it.
      source: the copy of the state that it begins with; None for the state that its slot has.
      copy: the copy to fill with the state that it ends with; None for none.
    """

    running: Running
    start: int
    count: int
    is_first: bool
    is_last: bool
    source: int | None = None
    copy: int | None = None

    @property
    def samples(self) -> bool:
        """Whether it gives the first token of an answer."""
        return self.is_last and self.running.given_token is None


class Result(NamedTuple):
    """The result of a dispatch for one slot that decodes or one chunk of a prompt.

    Attributes:
      tokens: the tokens that were emitted; empty if the slot had ended before, or the prompt goes on.
      verified: for each step that emitted any, the drafts verified and how many of them the target accepted.
      done: whether the device ended the request.
      failed: whether it did so because the logits after the tokens are not finite.
      logprobs: of the tokens.
    """

    tokens: list[int]
    verified: list[tuple[int, int]]
    done: bool
    failed: bool
    logprobs: Reported = NOTHING


@dataclass(frozen=True)
class Dispatch:
    """One run of a program.

    Attributes:
      batch: the requests it serves, at most one per slot.
      is_decoding: for each of them, whether it decodes in the first step; False if its prompt is read.
      decodes: whether any decodes.
      steps: how many steps it runs, at most S; 1 if none decodes.
      chunks: the chunks of prompts that it reads, in its first step; empty for none. If any request decodes,
        one whose prompt ends decodes from the second step on.
      min_tokens, max_tokens: for each request, the least and the most tokens that it emits.
      drafts: K of those that decode.
      limits: for each request, the most drafts that may be accepted in a step.
      scores: whether its chunks are of texts to be scored; nothing is emitted then.
    """

    batch: list[Running]
    is_decoding: list[bool]
    decodes: bool
    steps: int
    chunks: list[Chunk]
    min_tokens: list[int]
    max_tokens: list[int]
    drafts: int
    limits: list[int]
    scores: bool = False


class Choice(NamedTuple):
    """The choice of K for a dispatch.

    Attributes:
      drafts: K; at least the number of drafts that any of its requests asked for.
      reread: requests to read again, so that they can get drafts.
    """

    drafts: int
    reread: Sequence[Running] = ()


@dataclass
class Scheduler:
    """Fills slots from a queue: by priority, and first come, first served among equals.

    Requests keep this order until they end. A request that waits for pages holds up those behind it, but
    never for longer than those before it run. Prompts are read in the order of admission. When the pages run
    out, the last request of the order gives its pages back; its prompt and answer are read again later.

    Full pages are kept for requests that begin with the same tokens (`_keep`). This is safe because each
    program takes the state that the one before it returned, so programs run in the order of planning:
      - A page is kept as soon as the dispatch that fills it is planned. A request that finds the page is
        planned later, or in the same step, where a layer writes all rows before any attends.
      - A kept page is never written. Its user's later chunks start behind it, and steps write only from the
        committed length on, which also lies behind it. This includes steps in flight for a request that the
        host has already ended or put back.
      - A request may get a page that another one used. It writes each row of the page before reading it, and
        it is planned after everything that may still read or write the page for the other one.

    Attributes:
      batch_size: B, the number of slots.
      pages: the pool of cache pages.
      steps: S, the most steps of a dispatch that decodes; the first of them may read prompts.
      adapts_steps: whether a dispatch has fewer steps if it serves several slots or prompts wait to be read.
        Otherwise it always has S.
      tokens_per_step: K + 1 for the largest K, the most tokens that a slot emits in a step.
      chunk_size: C, the most tokens of a chunk.
      max_chunks: the most chunks of a prefill dispatch, which only reads prompts.
      mixed_chunks: the numbers of chunks, ascending, that a mixed dispatch can read in its first step, one
        for each such program. If it is empty, prompts are read between decode dispatches.
      chunks_between: the most chunks that are then read between two decode dispatches.
      prefix_caching: whether full pages are kept.
      choose: chooses K for decoding slots; None always takes the largest.
      hold_grammar: places a request's grammar on the device and counts the request among its users; False if
        the grammars of others leave no room.
      drafter_has_rows: whether the drafter caches rows or keeps a state that plain decoding does not update.
      waiting: the queue.
      slots: what runs in each slot; None if nothing does.
      running: the same, in the order of the queue.
      is_held: whether only requests that have begun get slots, because the weights are to be replaced.
      weights_version: see `Generation`.
      num_added: requests queued so far.
      num_preempted: how often a request gave its pages back.
    """

    batch_size: int
    pages: PagePool
    steps: int
    tokens_per_step: int
    chunk_size: int
    max_chunks: int
    adapts_steps: bool = False
    mixed_chunks: Sequence[int] = ()
    chunks_between: int = 8
    prefix_caching: bool = True
    choose: Callable[[Sequence[Running]], Choice] | None = None
    hold_grammar: Callable[[PlacedGrammar | None], bool] = lambda grammar: True
    drafter_has_rows: bool = True
    waiting: list[Request] = field(default_factory=list)
    slots: list[Running | None] = field(init=False)
    running: list[Running] = field(default_factory=list)
    is_held: bool = False
    weights_version: int = 0
    num_added: int = 0
    num_preempted: int = 0
    # A heap. The requests may have ended, and nothing else may hold them.
    _deadlines: list[tuple[float, int, "ref[Request]"]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.batch_size

    def __bool__(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def begun(self) -> list[Request]:
        """The requests that have had a slot: those that run, and those that were put back."""
        back = [request for request in self.waiting if request.weights_version is not None]
        return [*(running.request for running in self.running), *back]

    def add(self, request: Request) -> None:
        """Puts a new request into the queue."""
        request.queue_key = (-request.priority, self.num_added)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, self.num_added, ref(request)))
        self.num_added += 1
        request.stage = "queued"
        insort(self.waiting, request, key=_QUEUE_KEY)

    def plan(self, share: Share | None = None) -> list[Dispatch]:
        """Admits requests that fit; returns the next dispatches, none if all work is in flight.

        Args:
          share: of requests that decode (True), or whose prompts are read (False), gives the first and those
            that a compiled program serves together with it; None if one serves all. Others get dispatches of
            their own.
        """
        for running in list(self.running):
            if running.is_leaving and not running.max_in_flight:
                self._put_back(running)
        self._admit()
        self._reserve()
        decoding = [running for running in self.running if running.decodes]
        unread = [running for running in self.running if not running.is_read and not running.request.scoring]
        dispatches = self._score(beside=bool(decoding or unread))
        if decoding and unread and self.mixed_chunks:
            chunks = self._next_chunks(unread, self._num_mixed_chunks(unread))
            return [*dispatches, self._make_dispatch(decoding, chunks)]
        budget = self.chunks_between if decoding else self.max_chunks if self.mixed_chunks else None
        while (unread := [running for running in unread if not running.is_read]) and budget != 0:
            together = share(unread, False) if share else unread
            chunks = self._next_chunks(together, min(self.max_chunks, budget or self.max_chunks))
            budget = None if budget is None else budget - len(chunks)
            dispatches.append(self._make_dispatch([], chunks))
        decoding = [running for running in self.running if running.decodes]
        while decoding:
            together = share(decoding, True) if share else decoding
            dispatches.append(self._make_dispatch(together, []))
            decoding = [running for running in decoding if running not in together]
        return dispatches

    def commit_scores(self, dispatch: Dispatch, reported: Sequence[Any], hidden: Sequence[Any]) -> None:
        """Applies the results of a dispatch that scores.

        Args:
          reported, hidden: [G, C, …], see `Scoring.take`.
        """
        for i, chunk in enumerate(dispatch.chunks):
            # Also of a request that has left its slot: others may have found its pages.
            scoring = cast(Scoring, chunk.running.request.scoring)
            scoring.take(chunk.start, chunk.count, [x[i] for x in reported], [x[i] for x in hidden])
        for chunk in dispatch.chunks:
            running = chunk.running
            if chunk.is_last and self._is_current(running):
                running.request.end_scoring(self.pages.page_size)
                if running.request.finish_reason == "failed":
                    self.pages.forget(running.pages)  # they may hold the NaN
                self._free(running)

    def commit(self, dispatch: Dispatch, of_slots: Sequence[Result], of_chunks: Sequence[Result]) -> None:
        """Applies the results of a dispatch.

        Args:
          of_slots: one for each slot of the batch, and for the unused entries behind them, if it decodes.
          of_chunks: one for each of its chunks, and for the program's unused chunks behind them.
        """
        in_flight = zip(dispatch.batch, dispatch.min_tokens, dispatch.max_tokens, strict=True)
        for running, min_tokens, max_tokens in in_flight:
            running.min_in_flight -= min_tokens
            running.max_in_flight -= max_tokens
        results = [
            # No draft was verified; a given token has been delivered before.
            (chunk.running, result._replace(tokens=result.tokens if chunk.samples else [], verified=[]))
            for chunk, result in zip(dispatch.chunks, of_chunks, strict=False)
        ]
        results += zip(dispatch.batch, of_slots, strict=False)
        for running, result in results:
            if self._is_current(running):
                self._commit(running, result)

    def abort(self, request: Request, why: str) -> None:
        """Ends a queued or running request; does nothing if it has ended."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.end("aborted", why)
        for running in self.running:
            if running.request is request:
                self._free(running)
                return

    def expire(self, now: float) -> None:
        """Aborts requests whose deadline is not after `now`, a time of `time.monotonic()`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[2]()
            if request is not None:
                self.abort(request, "its deadline has passed")

    def restart(self) -> None:
        """Puts every running request back into the queue, after the device has lost its state.

        They keep their places in the order and their answers so far, which are read again with the prompts.
        """
        for running in list(self.running):
            self._put_back(running)
        self.pages.clear()

    def _admit(self) -> None:
        for slot, occupant in enumerate(self.slots):
            if occupant is None and (request := self._next()):
                answered = request.token_ids
                tokens, given_token = request.prompt + answered[:-1], answered[-1] if answered else None
                # With recurrent layers, what is found now may have lost its state before it is used.
                found = [] if self.pages.has_states else self._find(request, 0, len(tokens))
                # One position more for the next token, unless none comes.
                positions = min(len(tokens) + 1, len(request.prompt) + request.max_new_tokens)
                missing = self.pages.pages_for(positions) - len(found)
                # Leave a page for each running request to grow into, so that this one is not preempted soon.
                has_pages = missing + len(self.running) <= self.pages.num_free
                if not has_pages or not self.hold_grammar(request.grammar):
                    self.pages.release(found)
                    return
                self.waiting.remove(request)
                request.stage = "running"
                if request.weights_version is None:
                    for each in request.together or (request,):
                        each.weights_version, each.together = self.weights_version, ()
                if request.scoring:
                    request.scoring.found = [self.pages.notes[page] for page in found]
                pages = found + self.pages.allocate(missing)
                state = request.grammar.state_after(answered[:-1]) if request.grammar else 0
                running = Running(request, slot, pages, tokens, given_token, state, num_kept=len(found))
                self.slots[slot] = running
                insort(self.running, running, key=lambda running: running.request.queue_key)

    def _next(self) -> Request | None:
        """The first request of the queue that may get a slot."""
        if not self.is_held:
            return self.waiting[0] if self.waiting else None
        return next((request for request in self.waiting if request.weights_version is not None), None)

    def _reserve(self) -> None:
        """Allocates the pages that the next dispatch may write; the last in the order lose theirs first."""
        for running in list(self.running):
            if self._is_current(running):
                request = running.request
                # Every draft that may be accepted needs a page; drafts past the request's end do not.
                committed = request.num_tokens + running.max_in_flight
                ahead = (self.steps + 1) * (self.tokens_per_step + request.max_forced)
                positions = min(committed + ahead, len(request.prompt) + request.max_new_tokens)
                missing = self.pages.pages_for(positions) - len(running.pages)
                while missing > self.pages.num_free and self._is_current(running):
                    self._put_back(self.running[-1])
                    self.num_preempted += 1
                if missing > 0 and self._is_current(running):
                    running.pages += self.pages.allocate(missing)

    def _find(self, request: Request, first: int, num_tokens: int) -> list[int]:
        """Shares kept pages of a text of `num_tokens` tokens, from page `first` on.

        The page of the last token is never shared: its row must run, because it gives the logits and the
        state that the drafter continues from.
        """
        if not self._shares(request):
            return []
        return self.pages.share(self._keys(request, first, (num_tokens - 1) // self.pages.page_size))

    def _begin(self, running: Running) -> int | None:
        """Replaces its own pages by kept ones that other requests have filled since it was admitted.

        Returns:
          The copy of the state behind them; None without recurrent layers, or if there are none.
        """
        first = running.num_kept
        found = self._find(running.request, first, len(running.tokens))
        behind = first + len(found)
        self.pages.release(running.pages[first:behind])
        running.pages[first:behind] = found
        running.num_kept, running.num_read = behind, behind * self.pages.page_size
        running.is_begun = True
        if running.request.scoring:
            running.request.scoring.found += [self.pages.notes[page] for page in found]
        if running.request.cached_tokens is None:
            running.request.cached_tokens = running.num_read
        return self._place_states(running) if self.pages.has_states else None

    def _place_states(self, running: Running) -> int | None:
        """Decides where the states of a text are copied: behind its last full page, as its answer or another
        text may follow there, and where kept pages without a state show that texts have begun alike.

        Returns:
          See `_begin`.
        """
        request, size = running.request, self.pages.page_size
        if not self._shares(request):
            return None
        keys = self._keys(request, 0, (len(running.tokens) - 1) // size)
        ends = {self.pages.count_kept(keys) * size, len(keys) * size}
        running.states_at = sorted(end for end in ends if end > running.num_read)
        return self.pages.state(keys[running.num_kept - 1]) if running.num_kept else None

    def _keep(self, running: Running) -> None:
        """Keeps the pages whose rows are all planned and for which the token after the last one is known."""
        request = running.request
        end = request.num_tokens - 1 if running.is_read else running.num_read
        if running.missing_from is not None:
            end = min(end, running.missing_from)
        first, last = running.num_kept, end // self.pages.page_size
        if self._shares(request) and first < last:
            for page, key in zip(running.pages[first:last], self._keys(request, first, last), strict=True):
                self.pages.keep(page, key, request.scoring)
            running.num_kept = last

    def _shares(self, request: Request) -> bool:
        """Whether a request uses pages that others have filled, and keeps its own for others."""
        return self.prefix_caching and (request.scoring is None or request.scoring.shares_pages)

    def _keys(self, request: Request, first: int, last: int) -> list[bytes]:
        """The keys of a request's pages `first` to `last - 1`; the token behind them must be known."""
        keys, size = request.page_keys, self.pages.page_size
        if len(keys) < last:
            tokens = request.tokens(len(keys) * size, last * size + 1)
            before = request.scoring.first_key(request.params) if request.scoring else b""
            keys += page_keys(tokens, size, keys[-1] if keys else before)
        return keys[first:last]

    def _score(self, *, beside: bool) -> list[Dispatch]:
        """The next dispatch that scores texts, if there are any: those that are told the same as the first.

        Args:
          beside: whether there is other work, which should not wait for long.
        """
        unread = [running for running in self.running if not running.is_read and running.request.scoring]
        if not unread:
            return []
        first, *_ = told = [cast(Scoring, running.request.scoring) for running in unread]
        same = [running for running, each in zip(unread, told, strict=True) if each.is_told_as(first)]
        most = self.mixed_chunks[-1] if self.mixed_chunks else self.chunks_between
        chunks = self._next_chunks(same, min(self.max_chunks, most) if beside else self.max_chunks)
        batch = list(dict.fromkeys(chunk.running for chunk in chunks))
        nothing = [0] * len(batch)
        return [
            Dispatch(batch, [False] * len(batch), False, 1, chunks, nothing, nothing, 0, nothing, scores=True)
        ]

    def _num_mixed_chunks(self, unread: Sequence[Running]) -> int:
        """The number of chunks to read in a step.

        With one step per dispatch, the most chunks that fill a program, as the next step soon reads the
        rest; at least the smallest program's. With several steps per dispatch the host is the bottleneck:
        as many as a step can read.
        """
        if self.steps > 1:
            return self.mixed_chunks[-1]
        left = sum(-(-(len(running.tokens) - running.num_read) // self.chunk_size) for running in unread)
        return max((count for count in self.mixed_chunks if count <= left), default=self.mixed_chunks[0])

    def _next_chunks(self, unread: Sequence[Running], max_chunks: int) -> list[Chunk]:
        """At most `max_chunks` chunks, in the order of the requests; several may belong to one prompt."""
        chunks: list[Chunk] = []
        for running in unread:
            while len(chunks) < max_chunks and not running.is_read:
                is_first = not running.is_begun
                source = self._begin(running) if is_first else None
                start = running.num_read
                end = min(start + self.chunk_size, len(running.tokens))
                end = next((each for each in running.states_at if start < each < end), end)
                running.num_read = end
                self._keep(running)
                copy = None
                if end in running.states_at:
                    copy = self.pages.keep_state(running.request.page_keys[end // self.pages.page_size - 1])
                chunks.append(Chunk(running, start, end - start, is_first, running.is_read, source, copy))
        return chunks

    def _make_dispatch(self, decoding: list[Running], chunks: list[Chunk]) -> Dispatch:
        # A decoding slot emits at least one token per step. A slot whose prompt ends emits its first token
        # and, if others decode, decodes in the remaining steps.
        steps = self._num_steps(len(decoding)) if decoding else 1
        later_steps = steps - 1
        beginning = [chunk.running for chunk in chunks if chunk.is_last and later_steps]
        drafts = self._choose(decoding, beginning)
        least = dict.fromkeys(decoding, steps)
        for chunk in chunks:
            least[chunk.running] = int(chunk.samples) + (later_steps if chunk.is_last else 0)
        limits = [self._limit(running, drafts) for running in least]
        batch, min_tokens = list(least), list(least.values())
        max_tokens = [count * (limit + 1) for count, limit in zip(min_tokens, limits, strict=True)]
        for running, at_least, at_most in zip(batch, min_tokens, max_tokens, strict=True):
            running.min_in_flight += at_least
            running.max_in_flight += at_most
        is_decoding = [i < len(decoding) for i in range(len(batch))]
        return Dispatch(
            batch, is_decoding, bool(decoding), steps, chunks, min_tokens, max_tokens, drafts, limits
        )

    def _num_steps(self, slots: int) -> int:
        """Steps of a dispatch in which so many slots decode.

        A new request waits for the dispatches in flight, so they have fewer steps for more slots, whose steps
        take longer: about twice as long for eight as for one.
        """
        if not self.adapts_steps:
            return self.steps
        is_reading = any(not running.is_read for running in self.running)
        return 1 if is_reading else max(self.steps * 8 // (slots + 7), 1)

    def _choose(self, decoding: Sequence[Running], beginning: Sequence[Running]) -> int:
        """K for slots that decode or begin to. With K = 0, they lack rows of the drafter from here on."""
        if self.choose is None or not decoding:
            return self.tokens_per_step - 1
        drafts, reread = self.choose(decoding)
        drafts = max(drafts, *(running.request.num_drafts or 0 for running in [*decoding, *beginning]))
        for running in reread:
            running.is_leaving = True
        if not drafts and self.drafter_has_rows:
            for running in decoding:
                if running.missing_from is None:
                    running.missing_from = running.request.num_tokens + running.min_in_flight - 1
            for running in beginning:
                running.missing_from = len(running.tokens)
        return drafts

    def _limit(self, running: Running, drafts: int) -> int:
        """How many of a dispatch's drafts may be accepted: its own number, or 0 if the drafter lacks rows.
        Tokens that a grammar forces may come behind them."""
        if running.missing_from is not None:
            return 0
        own = running.request.num_drafts
        limit = drafts if own is None else min(own, drafts)
        return limit + running.request.max_forced if limit else 0

    def _is_current(self, running: Running) -> bool:
        """Whether it still has its slot; results for a request that has left its slot are dropped."""
        return self.slots[running.slot] is running

    def _commit(self, running: Running, result: Result) -> None:
        request = running.request
        if result.tokens:
            ended = result.done and not result.failed
            request.append(result.tokens, result.verified, result.logprobs, ended=ended)
            self._keep(running)
        if result.failed:
            self._fail(running)
        if request.finish_reason is not None:
            self._free(running)

    def _fail(self, running: Running) -> None:
        at = running.request.num_tokens - 1
        problem = f"the target's logits are NaN or infinite at position {at}"
        if running.request.asked.constraints:
            problem += ", or the constraints allow no token there"
        running.request.end("failed", problem)
        # Its pages may hold the NaN, and so may states behind equal pages of others.
        self.pages.forget(running.pages)
        for key in running.request.page_keys:
            self.pages.forget_state(key)

    def _free(self, running: Running) -> None:
        self.slots[running.slot] = None
        self.running.remove(running)
        self.pages.release(running.pages)
        if running.request.grammar:
            running.request.grammar.users -= 1

    def _put_back(self, running: Running) -> None:
        self._free(running)
        running.request.stage = "queued"
        insort(self.waiting, running.request, key=_QUEUE_KEY)
