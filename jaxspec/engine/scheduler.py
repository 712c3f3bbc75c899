"""Which request runs in which slot, and what the next dispatch does. Plain Python, no arrays."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request


@dataclass(eq=False)
class Running:
    """A request in a slot.

    Attributes:
      pages: the cache pages it owns, from admission to its end.
      num_prefilled: prompt tokens already sent to the device.
      num_in_flight: tokens that the dispatches not yet read are sure to emit.
    """

    request: Request
    slot: int
    pages: list[int]
    num_prefilled: int = 0
    num_in_flight: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled >= len(self.request.prompt)

    @property
    def may_go_on(self) -> bool:
        """Whether tokens may be missing once everything in flight has been read."""
        left = self.request.max_new_tokens - len(self.request.token_ids) - self.num_in_flight
        return self.is_prefilled and left > 0


@dataclass(frozen=True)
class Chunk:
    """`count` prompt tokens from `start` of a slot's request."""

    running: Running
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count >= len(self.running.request.prompt)


class SlotStep(NamedTuple):
    """What one step of a decode dispatch did for a slot.

    Attributes:
      tokens: emitted; none where the slot had ended.
      drafted: drafts verified.
      accepted: those that the target accepted.
      done: whether the device ended the request.
    """

    tokens: list[int]
    drafted: int
    accepted: int
    done: bool


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
    """Fills slots from a queue, first come first served.

    Attributes:
      prefill_budget: prompt tokens per round while other slots are decoding, so that a long prompt
        does not hold them up.
    """

    batch_size: int
    pages: PageAllocator
    prefill_rows: int
    prefill_chunk: int
    steps_per_dispatch: int
    prefill_budget: int = 512
    waiting: deque[Request] = field(default_factory=deque)
    slots: list[Running | None] = field(init=False)
    live: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.batch_size
        # False where the host ended a request that the device may still be running.
        self.live = [True] * self.batch_size

    def add(self, request: Request) -> None:
        """Puts a request into the queue."""
        self.waiting.append(request)

    def plan(self) -> Plan:
        """Admits what fits, and says what to dispatch next."""
        self._admit()
        decoding = any(running.may_go_on for running in self._running())
        prefills = self._plan_prefills(self.prefill_budget if decoding else None)
        decodes = [running for running in self._running() if running.may_go_on]
        for running in decodes:
            running.num_in_flight += self.steps_per_dispatch
        return Plan(prefills, decodes)

    def commit_first(self, chunk: Chunk, token: int, *, done: bool) -> None:
        """Takes the first token of a prompt whose last chunk has run."""
        running = chunk.running
        running.num_in_flight -= 1
        if running.request.finish_reason is None:
            running.request.append([token], ended=done)
            self._free_if_finished(running, device_done=done)

    def commit_decode(self, running: Running, steps: list[SlotStep]) -> None:
        """Takes what a decode dispatch did for a slot."""
        running.num_in_flight -= self.steps_per_dispatch
        request = running.request
        for tokens, drafted, accepted, done in steps:
            if request.finish_reason is not None:
                return
            if tokens:
                request.stats.add_step(drafted, accepted)
                request.append(tokens, ended=done)
                self._free_if_finished(running, device_done=done)

    def cancel(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        for running in self._running():
            if running.request is request:
                request.finish_reason = request.finish_reason or "stop"
                self._free_if_finished(running, device_done=False)

    def _running(self) -> list[Running]:
        return [running for running in self.slots if running is not None]

    def _admit(self) -> None:
        for slot, running in enumerate(self.slots):
            if running is None and self.waiting:
                request = self.waiting[0]
                positions = len(request.prompt) + request.max_new_tokens
                if not self.pages.can_allocate(positions):
                    return
                self.waiting.popleft()
                self.slots[slot] = Running(request, slot, self.pages.allocate(positions))

    def _plan_prefills(self, budget: int | None) -> list[list[Chunk]]:
        groups: list[list[Chunk]] = []
        spent = 0
        while budget is None or spent < budget:
            unfinished = [running for running in self._running() if not running.is_prefilled]
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
        count = min(self.prefill_chunk, len(running.request.prompt) - start)
        running.num_prefilled += count
        chunk = Chunk(running, start, count)
        if chunk.is_last:
            running.num_in_flight += 1
        return chunk

    def _free_if_finished(self, running: Running, *, device_done: bool) -> None:
        if running.request.finish_reason is None:
            return
        self.live[running.slot] = device_done
        self.slots[running.slot] = None
        # Dispatches run in order, so what is in flight writes these pages before their next owner does.
        self.pages.release(running.pages)
