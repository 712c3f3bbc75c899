"""Which request runs in which slot, and what the next dispatch does. Plain Python, no arrays."""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request


@dataclass(eq=False)
class Running:
    """A request in a slot.

    Attributes:
      pages: the cache pages it owns, from admission to its end.
      tokens: what is read before it decodes: its prompt, and what it had answered if it starts again.
      known: the token after them, if it starts again; otherwise prefill samples it.
      num_prefilled: of `tokens`, sent to the device already.
      num_in_flight: tokens that the dispatches not yet read are sure to emit.
    """

    request: Request
    slot: int
    pages: list[int]
    tokens: list[int]
    known: int | None
    num_prefilled: int = 0
    num_in_flight: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled >= len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that the device may emit from `tokens` on, the known one included."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def may_go_on(self) -> bool:
        """Whether tokens may be missing once everything in flight has been read."""
        left = self.request.max_new_tokens - len(self.request.token_ids) - self.num_in_flight
        return self.is_prefilled and left > 0


@dataclass(frozen=True)
class Chunk:
    """`count` tokens from `start` of what a slot's request reads."""

    running: Running
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count >= len(self.running.tokens)

    @property
    def samples(self) -> bool:
        """Whether the first token of an answer comes out of it."""
        return self.is_last and self.running.known is None


class SlotStep(NamedTuple):
    """What one step of a decode dispatch did for a slot.

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
class Plan:
    """One round of dispatches: groups of prompt chunks, each a prefill program, then maybe a decode.

    Attributes:
      prefills: chunks of at most `prefill_rows` slots each.
      decodes: the slots that a decode program advances; empty for none.
    """

    prefills: list[list[Chunk]]
    decodes: list[Running]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)


@dataclass
class Scheduler:
    """Fills slots from a queue: by priority, and first come first served among equals.

    The order is kept to the end: a request that waits for pages holds up those behind it, never longer than
    those before it run, and prompts are read in the order in which they were admitted.

    Attributes:
      prefill_budget: prompt tokens per round while other slots are decoding, so that a long prompt
        does not hold them up.
      waiting: the queue.
      slots: what runs in each slot.
      running: the same in the order of the queue.
      live: False where the host ended a request that the device may still be running.
    """

    batch_size: int
    pages: PageAllocator
    prefill_rows: int
    prefill_chunk: int
    steps_per_dispatch: int
    prefill_budget: int = 512
    waiting: list[Request] = field(default_factory=list)
    slots: list[Running | None] = field(init=False)
    running: list[Running] = field(default_factory=list)
    live: list[bool] = field(init=False)
    _num_added: int = 0

    def __post_init__(self) -> None:
        self.slots = [None] * self.batch_size
        self.live = [True] * self.batch_size

    def __bool__(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Puts a request into the queue."""
        request.place = (-request.priority, self._num_added)
        self._num_added += 1
        request.stage = "queued"
        insort(self.waiting, request, key=_place)

    def plan(self) -> Plan:
        """Admits what fits, and says what to dispatch next."""
        self._admit()
        decoding = any(running.may_go_on for running in self.running)
        prefills = self._plan_prefills(self.prefill_budget if decoding else None)
        decodes = [running for running in self.running if running.may_go_on]
        for running in decodes:
            running.num_in_flight += self.steps_per_dispatch
        return Plan(prefills, decodes)

    def commit_first(self, chunk: Chunk, token: int, *, done: bool, failed: bool = False) -> None:
        """Takes what the last chunk of a prompt gave: the first token of the answer, unless it is known."""
        running = chunk.running
        running.num_in_flight -= chunk.samples
        if running.request.finish_reason is None:
            if failed:
                self._fail(running)
            elif chunk.samples:
                running.request.append([token], ended=done)
            self._free_if_finished(running, device_done=done)

    def commit_decode(self, running: Running, steps: list[SlotStep]) -> None:
        """Takes what a decode dispatch did for a slot."""
        running.num_in_flight -= self.steps_per_dispatch
        request = running.request
        for tokens, drafted, accepted, done, failed in steps:
            if request.finish_reason is not None:
                return
            if tokens:
                request.stats.add_step(drafted, accepted)
                request.append(tokens, ended=done and not failed)
            if failed:
                self._fail(running)
            self._free_if_finished(running, device_done=done)

    def abort(self, request: Request, why: str) -> None:
        """Ends a request wherever it is; one that has ended stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.end("aborted", why)
        for running in self.running:
            if running.request is request:
                self._free_if_finished(running, device_done=False)
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
        for running in self.running:
            insort(self.waiting, running.request, key=_place)
            running.request.stage = "queued"
            self.pages.release(running.pages)
        self.running.clear()
        self.slots = [None] * self.batch_size
        self.live = [True] * self.batch_size

    def _admit(self) -> None:
        for slot, occupant in enumerate(self.slots):
            if occupant is None and self.waiting:
                request = self.waiting[0]
                positions = len(request.prompt) + request.max_new_tokens
                if not self.pages.can_allocate(positions):
                    return
                self.waiting.pop(0)
                request.stage = "running"
                answered = request.token_ids
                tokens, known = request.prompt + answered[:-1], answered[-1] if answered else None
                running = Running(request, slot, self.pages.allocate(positions), tokens, known)
                self.slots[slot] = running
                insort(self.running, running, key=lambda running: running.request.place)

    def _plan_prefills(self, budget: int | None) -> list[list[Chunk]]:
        groups: list[list[Chunk]] = []
        spent = 0
        while budget is None or spent < budget:
            unfinished = [running for running in self.running if not running.is_prefilled]
            if not unfinished:
                break
            group = [self._next_chunk(running) for running in unfinished[: self.prefill_rows]]
            spent += sum(chunk.count for chunk in group)
            groups.append(group)
        return groups

    def _next_chunk(self, running: Running) -> Chunk:
        start = running.num_prefilled
        # Only now: until its first chunk runs, the device may still take the slot for a request that the
        # host ended, whose pages are another's by then.
        self.live[running.slot] = True
        count = min(self.prefill_chunk, len(running.tokens) - start)
        running.num_prefilled += count
        chunk = Chunk(running, start, count)
        running.num_in_flight += chunk.samples
        return chunk

    def _fail(self, running: Running) -> None:
        at = len(running.request.prompt) + len(running.request.token_ids)
        running.request.end("failed", f"the target's logits are NaN or infinite at position {at - 1}")

    def _free_if_finished(self, running: Running, *, device_done: bool) -> None:
        if running.request.finish_reason is None:
            return
        self.live[running.slot] = device_done
        self.slots[running.slot] = None
        self.running.remove(running)
        # Dispatches run in order, so what is in flight writes these pages before their next owner does.
        self.pages.release(running.pages)


def _place(request: Request) -> tuple[int, int]:
    return request.place
