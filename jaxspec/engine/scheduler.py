"""Which request runs in which slot, and what the next dispatch does. Plain Python, no arrays."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.engine.pages import PagePool, page_key
from jaxspec.engine.request import Request


@dataclass(eq=False)
class Running:
    """A request in a slot.

    Attributes:
      pages: the cache pages it uses; more are taken before each dispatch, as far as it may get by it.
      tokens: what is read before it decodes: its prompt, and what it had answered if it starts again.
      known: the token after them, if it starts again; otherwise it is sampled.
      num_kept: of its first pages, those that are kept: found, or filled by itself.
      num_read: of `tokens`, found in pages or sent to the device already.
      is_begun: whether some have been sent.
      sure, most: tokens that the dispatches not yet read emit at least, and at most.
      missing_from: the position from which rows of the drafter's are missing, for it was decoded plainly;
        None where none are.
      is_leaving: it is put back once nothing of it is in flight, so that those rows are read.
    """

    request: Request
    slot: int
    pages: list[int]
    tokens: list[int]
    known: int | None
    num_kept: int = 0
    num_read: int = 0
    is_begun: bool = False
    sure: int = 0
    most: int = 0
    missing_from: int | None = None
    is_leaving: bool = False

    @property
    def is_read(self) -> bool:
        """Whether its prompt has been sent to the device."""
        return self.num_read >= len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that the device may emit from `tokens` on, the known one included."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def decodes(self) -> bool:
        """Whether tokens may be missing once everything in flight has been read."""
        wanted = self.request.max_new_tokens - len(self.request.token_ids) > self.sure
        return self.is_read and wanted and not self.is_leaving


@dataclass(frozen=True)
class Chunk:
    """`count` tokens from `start` of what a request reads.

    Attributes:
      is_first: what lies before it was found in pages.
      is_last: nothing is left to read.
    """

    running: Running
    start: int
    count: int
    is_first: bool
    is_last: bool

    @property
    def samples(self) -> bool:
        """Whether the first token of an answer comes out of it."""
        return self.is_last and self.running.known is None


class FirstToken(NamedTuple):
    """What came out of the last chunk of a prompt: the answer's first token.

    Attributes:
      done: whether the device ended the request with it.
      failed: whether it did so because the logits are not finite.
    """

    token: int
    done: bool
    failed: bool


class SlotStep(NamedTuple):
    """What one step of a dispatch did for a slot that decodes.

    Attributes:
      tokens: emitted; none where the slot had ended.
      drafted: drafts verified.
      accepted: those that the target accepted.
      done: whether the device ended the request.
      failed: whether it did so because the logits after the tokens are not finite.
    """

    tokens: list[int]
    drafted: int
    accepted: int
    done: bool
    failed: bool


@dataclass(frozen=True)
class Dispatch:
    """One run of a program.

    Attributes:
      served: what runs in its places.
      goes_on: of each, whether it decodes what an earlier dispatch left.
      decodes: whether slots decode: S steps long, or for the one step that reads prompts beside.
      chunks: what it reads of prompts; empty for none.
      sure, most: of each, tokens that it emits at least and at most.
      drafts: K of those that decode.
      limits: of each, the drafts that may be accepted.
    """

    served: list[Running]
    goes_on: list[bool]
    decodes: bool
    chunks: list[Chunk]
    sure: list[int]
    most: list[int]
    drafts: int
    limits: list[int]


class Choice(NamedTuple):
    """K of a dispatch.

    Attributes:
      drafts: K, at least what any of its requests is to have.
      again: what is to be read again, so that it can be drafted for.
    """

    drafts: int
    again: Sequence[Running] = ()


@dataclass
class Scheduler:
    """Fills slots from a queue: by priority, and first come first served among equals.

    The order is kept to the end: a request that waits for pages holds up those behind it, never longer than
    those before it run, and prompts are read in the order in which they were admitted. Where the pages run
    out, the last of the order gives its own back, and is read again later, prompt and answer so far.

    A full page is kept for requests that begin with the same tokens (`_keep`). That is sound because each
    program takes the state that the one before it returned: they run in the order in which they are planned.
      - A page is kept once what fills it is planned, so whoever finds it is planned later, or in the same
        step, where a layer writes the rows of all before any attends.
      - Nobody writes a kept page. Its user's later chunks start behind it, and its steps, those in flight
        included, write at the committed length and further on, which lies behind it as well: also where the
        host has ended or put back the request and the device does not know it yet.
      - Whoever gets a page that was in use writes every row of it before reading one, and is planned after
        whatever else may still write or read it.

    Attributes:
      steps: S, of a dispatch that decodes and reads no prompts.
      tokens_per_step: K + 1, the most that a slot emits in a step.
      choose: K for slots that decode; None always takes the largest.
      drafter_has_rows: the drafter caches rows or keeps a state, which plain decoding leaves behind.
      chunk: C, the most tokens of a chunk.
      most_chunks: of a dispatch for prompts alone.
      chunks_beside: the numbers of chunks, ascending, that a step can read beside the slots that decode:
        there are programs for them. Empty where prompts are read between dispatches that decode,
        `chunks_between` at a time.
      prefix_caching: keep full pages.
      waiting: the queue.
      slots: what runs in each slot.
      running: the same in the order of the queue.
    """

    batch_size: int
    pages: PagePool
    steps: int
    tokens_per_step: int
    chunk: int
    most_chunks: int
    chunks_beside: Sequence[int] = ()
    chunks_between: int = 8
    prefix_caching: bool = True
    choose: Callable[[Sequence[Running]], Choice] | None = None
    drafter_has_rows: bool = True
    waiting: list[Request] = field(default_factory=list)
    slots: list[Running | None] = field(init=False)
    running: list[Running] = field(default_factory=list)
    num_added: int = 0
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.slots = [None] * self.batch_size

    def __bool__(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Puts a request into the queue."""
        request.place = (-request.priority, self.num_added)
        self.num_added += 1
        request.stage = "queued"
        insort(self.waiting, request, key=_place)

    def plan(self) -> list[Dispatch]:
        """Admits what fits, and says what to dispatch next; nothing if all that may be done is in flight."""
        for running in [running for running in self.running if running.is_leaving and not running.most]:
            self._put_back(running)
        self._admit()
        self._reserve()
        decoding = [running for running in self.running if running.decodes]
        unread = [running for running in self.running if not running.is_read]
        dispatches = []
        if decoding and unread and self.chunks_beside:
            dispatches.append(self._dispatch(decoding, self._next_chunks(unread, self._num_beside(unread))))
            if not all(running.is_read for running in unread):
                return dispatches  # and the next ones in the next round, without the S steps between
        budget = self.chunks_between if decoding else self.most_chunks if self.chunks_beside else None
        while (unread := [running for running in unread if not running.is_read]) and budget != 0:
            chunks = self._next_chunks(unread, min(self.most_chunks, budget or self.most_chunks))
            budget = None if budget is None else budget - len(chunks)
            dispatches.append(self._dispatch([], chunks))
        decoding = [running for running in self.running if running.decodes]
        if decoding:
            dispatches.append(self._dispatch(decoding, []))
        return dispatches

    def commit(
        self, dispatch: Dispatch, first: Sequence[FirstToken], emitted: Sequence[Sequence[SlotStep]]
    ) -> None:
        """Takes what a dispatch did.

        Args:
          first: of each of its chunks.
          emitted: for each step, of each place; empty where the dispatch decodes nothing.
        """
        for running, sure, most in zip(dispatch.served, dispatch.sure, dispatch.most, strict=True):
            running.sure -= sure
            running.most -= most
        # What stands behind the last chunk and the last slot is of pieces and places without work.
        for chunk, token in zip(dispatch.chunks, first, strict=False):
            if chunk.is_last and self._is_current(chunk.running):
                self._commit_first(chunk, token)
        for step in emitted:
            for running, did in zip(dispatch.served, step, strict=False):
                if self._is_current(running):
                    self._commit_step(running, did)

    def abort(self, request: Request, why: str) -> None:
        """Ends a request wherever it is; one that has ended stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.end("aborted", why)
        for running in self.running:
            if running.request is request:
                self._free(running)
                return

    def expire(self, now: float) -> None:
        """Aborts what should have ended before `now`, by `time.monotonic()`."""
        for request in [*self.waiting, *(running.request for running in self.running)]:
            if request.deadline is not None and request.deadline <= now:
                self.abort(request, "its deadline has passed")

    def restart(self) -> None:
        """Takes every running request back into the queue: the device has lost its state.

        They keep their places and what they have answered, which is read again with the prompt.
        """
        for running in list(self.running):
            self._put_back(running)
        self.pages.clear()

    def _admit(self) -> None:
        for slot, occupant in enumerate(self.slots):
            if occupant is None and self.waiting:
                request = self.waiting[0]
                answered = request.token_ids
                tokens, known = request.prompt + answered[:-1], answered[-1] if answered else None
                found = self._find(request, 0, len(tokens))
                missing = self.pages.pages_for(len(tokens) + 1) - len(found)
                # What runs may grow by a page each before this one has to give its own back.
                if missing + len(self.running) > self.pages.num_free:
                    self.pages.release(found)
                    return
                self.waiting.pop(0)
                request.stage = "running"
                pages = found + self.pages.allocate(missing)
                running = Running(request, slot, pages, tokens, known, num_kept=len(found))
                self.slots[slot] = running
                insort(self.running, running, key=lambda running: running.request.place)

    def _reserve(self) -> None:
        """Takes the pages that the next dispatch may write, for the first of the order from the last."""
        for running in list(self.running):
            if self._is_current(running):
                request = running.request
                # Every draft that may be accepted has a page; those past the request's end need none.
                committed = len(request.prompt) + len(request.token_ids) + running.most
                ahead = (self.steps + 1) * self.tokens_per_step
                positions = min(committed + ahead, len(request.prompt) + request.max_new_tokens)
                missing = self.pages.pages_for(positions) - len(running.pages)
                while missing > self.pages.num_free and self._is_current(running):
                    self._put_back(self.running[-1])
                    self.num_preempted += 1
                if missing > 0 and self._is_current(running):
                    running.pages += self.pages.allocate(missing)

    def _find(self, request: Request, first: int, num_tokens: int) -> list[int]:
        """Takes kept pages of a text of so many tokens from page `first` on, the last token's never.

        The row of the last one has to run, for it gives the logits and what the drafter goes on from.
        """
        found: list[int] = []
        while self.prefix_caching and (first + len(found) + 1) * self.pages.page_size < num_tokens:
            page = self.pages.share(self._key(request, first + len(found)))
            if page is None:
                break
            found.append(page)
        return found

    def _begin(self, running: Running) -> None:
        """Takes what others have filled since it was admitted, instead of its own pages."""
        first = running.num_kept
        found = self._find(running.request, first, len(running.tokens))
        behind = first + len(found)
        self.pages.release(running.pages[first:behind])
        running.pages[first:behind] = found
        running.num_kept, running.num_read = behind, behind * self.pages.page_size
        running.is_begun = True
        if running.request.cached_tokens is None:
            running.request.cached_tokens = running.num_read

    def _keep(self, running: Running) -> None:
        """Keeps the pages of which every row is planned and the token after the last one known."""
        request = running.request
        text = len(request.prompt) + len(request.token_ids)
        end = text - 1 if running.is_read else running.num_read
        if running.missing_from is not None:
            end = min(end, running.missing_from)
        while self.prefix_caching and (running.num_kept + 1) * self.pages.page_size <= end:
            self.pages.keep(running.pages[running.num_kept], self._key(request, running.num_kept))
            running.num_kept += 1

    def _key(self, request: Request, page: int) -> bytes:
        keys, size = request.page_keys, self.pages.page_size
        while len(keys) <= page:
            start = len(keys) * size
            keys.append(page_key(keys[-1] if keys else b"", request.tokens(start, start + size + 1)))
        return keys[page]

    def _num_beside(self, unread: Sequence[Running]) -> int:
        """Chunks to read in a step: those that fill a program, for the next step comes soon; one at least.

        With several steps a dispatch the host is what is slow: as many as a step can read.
        """
        if self.steps > 1:
            return self.chunks_beside[-1]
        left = sum(-(-(len(running.tokens) - running.num_read) // self.chunk) for running in unread)
        return max((count for count in self.chunks_beside if count <= left), default=self.chunks_beside[0])

    def _next_chunks(self, unread: Sequence[Running], most: int) -> list[Chunk]:
        """At most so many chunks, the first in the order first; several may be of one prompt."""
        chunks: list[Chunk] = []
        for running in unread:
            while len(chunks) < most and not running.is_read:
                is_first = not running.is_begun
                if is_first:
                    self._begin(running)
                start = running.num_read
                running.num_read = min(start + self.chunk, len(running.tokens))
                chunks.append(Chunk(running, start, running.num_read - start, is_first, running.is_read))
                self._keep(running)
        return chunks

    def _dispatch(self, decoding: list[Running], chunks: list[Chunk]) -> Dispatch:
        # Decoding slots emit a token a step at least, a slot whose prompt ends its first token.
        steps = 1 if chunks else self.steps
        drafts = self._choose(decoding)
        sure = dict.fromkeys(decoding, steps)
        for chunk in chunks:
            sure[chunk.running] = int(chunk.samples)
        limits = [self._limit(running, drafts) for running in sure]
        most = [count * (limit + 1) for count, limit in zip(sure.values(), limits, strict=True)]
        for running, at_least, at_most in zip(sure, sure.values(), most, strict=True):
            running.sure += at_least
            running.most += at_most
        goes_on = [place < len(decoding) for place in range(len(sure))]
        return Dispatch(
            list(sure), goes_on, bool(decoding), chunks, list(sure.values()), most, drafts, limits
        )

    def _choose(self, decoding: Sequence[Running]) -> int:
        """K for these; without drafts, the drafter's rows are missing from here on."""
        if self.choose is None or not decoding:
            return self.tokens_per_step - 1
        drafts, again = self.choose(decoding)
        drafts = max(drafts, *(running.request.num_drafts or 0 for running in decoding))
        for running in again:
            running.is_leaving = True
        if not drafts and self.drafter_has_rows:
            for running in decoding:
                if running.missing_from is None:
                    request = running.request
                    running.missing_from = len(request.prompt) + len(request.token_ids) + running.sure - 1
        return drafts

    def _limit(self, running: Running, drafts: int) -> int:
        """The drafts of a K that may be accepted: its own number, none where the drafter lacks rows."""
        if running.missing_from is not None:
            return 0
        own = running.request.num_drafts
        return drafts if own is None else min(own, drafts)

    def _is_current(self, running: Running) -> bool:
        """Whether it still has its slot; what a dispatch did for one that gave it up is of no use."""
        return self.slots[running.slot] is running

    def _commit_first(self, chunk: Chunk, first: FirstToken) -> None:
        running = chunk.running
        if first.failed:
            self._fail(running)
        elif chunk.samples:
            running.request.append([first.token], ended=first.done)
            self._keep(running)
        if running.request.finish_reason is not None:
            self._free(running)

    def _commit_step(self, running: Running, step: SlotStep) -> None:
        request = running.request
        if step.tokens:
            request.add_step(step.drafted, step.accepted)
            request.append(step.tokens, ended=step.done and not step.failed)
            self._keep(running)
        if step.failed:
            self._fail(running)
        if request.finish_reason is not None:
            self._free(running)

    def _fail(self, running: Running) -> None:
        at = len(running.request.prompt) + len(running.request.token_ids) - 1
        running.request.end("failed", f"the target's logits are NaN or infinite at position {at}")
        # Whatever it is lies in its pages.
        self.pages.forget(running.pages)

    def _free(self, running: Running) -> None:
        self.slots[running.slot] = None
        self.running.remove(running)
        self.pages.release(running.pages)

    def _put_back(self, running: Running) -> None:
        self._free(running)
        running.request.stage = "queued"
        insort(self.waiting, running.request, key=_place)


def _place(request: Request) -> tuple[int, int]:
    return request.place
