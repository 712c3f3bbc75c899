"""Batch runs with several engines, each in its own process: on this machine, or on those of a cluster."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread

from jaxspec.engine import Engine
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.progress import LOOK_AHEAD, Progress
from jaxspec.service.batch.read_ahead import ReadAhead
from jaxspec.service.batch.replica import Message, PendingRow, Ready, Refused, Replica, Work
from jaxspec.service.rows import Row, RowError

MAX_DEATHS = 3
"""The run fails if one replica dies so often without an answer, or so many replicas die with the same row."""


class ReplicaError(RuntimeError):
    """A replica cannot be started or kept running; the message is one line."""


class ReplicaRun(Progress):
    """Answers rows with several engines; the answers equal those of a `BatchRun` with one engine.

    A row goes, with all of its turns, to the replica with the most room. Each replica holds a few more rows
    than its engine has slots. If a replica dies, its rows go to others and a new process replaces it.

    Messages and deaths are events in one queue, which only the thread that iterates takes from. A row belongs
    to its replica until its answer is taken from that queue, so no row is lost or counted twice.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        start: Sequence[Callable[[Work], Replica]],
        rows: Iterable[Row | RowError],
        params: SamplingParams,
        *,
        imports: Sequence[str] = (),
        raw: bool = False,
        keep_order: bool = False,
        note: Callable[[str], object] = lambda text: None,
    ):
        """Prepares a run: `start` loads the engines, and iterating (once) answers the rows. Use `closing`.

        Args:
          load: makes an engine in a replica's process; must be picklable.
          start: as in `Engines`.
          rows: as in `BatchRun`, each with its own place.
          params: as in `BatchRun`, with the run's seed.
          imports: Python files that each process runs first.
          raw, keep_order: as in `BatchRun`.
          note: called with a line of text when a replica dies, and with what the first replica prints while
            loading.
        """
        super().__init__(rows, keep_order=keep_order)
        self._work = Work(tuple(imports), load, params, raw)
        self._starts = start
        self._note = note
        self._events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._replicas: dict[int, Replica] = {}
        self._deaths = [0] * len(start)
        self._retries: deque[PendingRow] = deque()
        self._has_started = False

    def start(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Loads all engines at the same time.

        Args:
          on_ready: called after each engine is loaded.

        Raises:
          ReplicaError: an engine cannot be loaded.
        """
        for number in range(len(self._starts)):
            self._start(number)
        num_ready = 0
        while num_ready < len(self._replicas):
            self._events.get()()
            before, num_ready = num_ready, sum(replica.slots > 0 for replica in self._replicas.values())
            if num_ready > before:
                on_ready()
        self._has_started = True

    def close(self) -> None:
        """Ends all processes, immediately if they still have rows."""
        for replica in self._replicas.values():
            replica.send(None)
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()

    def __iter__(self) -> Generator[Answer | RowError, None, None]:
        """Runs the engines; yields rows as they finish, or in order, as `BatchRun` does.

        Raises:
          ReplicaError: a replica died `MAX_DEATHS` times.
          The exception that reading the rows raised.
        """
        size = sum(replica.slots for replica in self._replicas.values())
        self._look_ahead = 2 * LOOK_AHEAD * size
        wake = partial(self._events.put, lambda: None)
        with closing(ReadAhead(self._rows, size, on_change=wake)) as self._source:
            while True:
                self._hand_out()
                yield from self._ended()
                if self._is_done():
                    break
                self._events.get()()

    def _is_done(self) -> bool:
        is_running = any(replica.pending for replica in self._replicas.values())
        return self._source.is_done and not (is_running or self._retries or self._done)

    def _hand_out(self) -> None:
        while free := [replica for replica in self._replicas.values() if replica.room]:
            if self._retries:
                pending = self._retries.popleft()
            elif (read := self._next_row(may_wait=False)) is not None:
                pending = PendingRow(*read)
            else:
                return
            max(free, key=lambda replica: replica.room).give(pending)

    def _start(self, number: int) -> None:
        replica = self._starts[number](self._work)
        self._replicas[number] = replica
        # A daemon, because it may still be reading when an interrupted process ends.
        Thread(target=self._listen, args=(number, replica), daemon=True).start()

    def _listen(self, number: int, replica: Replica) -> None:
        """Turns the messages and the end of a process into events."""
        for message in replica.messages():
            self._events.put(partial(self._take, number, replica, message))
        self._events.put(partial(self._replace, number, replica))

    def _take(self, number: int, replica: Replica, message: Message) -> None:
        if isinstance(message, Ready):
            replica.slots = message.slots
            if number == 0 and (output := replica.last_output()):
                self._note(f"replica 1 says: {output}")  # the others say the same
        elif isinstance(message, Refused):
            # A replacement may start before the dead replica's device memory is free; it then counts as dead.
            if not self._has_started:
                raise ReplicaError(message.problem)
        else:
            row_place = message.row.place if isinstance(message, Answer) else message.place
            pending = replica.pending.pop(row_place)
            for generation in message.generations:
                self._count(generation)
            self._done[pending.index] = message
            self._deaths[number] = 0

    def _replace(self, number: int, replica: Replica) -> None:
        """Takes back the rows of a dead replica, and starts another instead."""
        death = f"replica {number + 1} of {len(self._starts)} died: {replica.cause_of_death()}"
        self._deaths[number] += 1
        back = [replace(pending, deaths=pending.deaths + 1) for pending in replica.pending.values()]
        most = max(self._deaths[number], *(pending.deaths for pending in back), 0)
        if most >= MAX_DEATHS:
            raise ReplicaError(f"{death}; that was {most} times in a row")
        self._note(f"{death}; its rows are answered again")
        self._retries.extendleft(reversed(back))
        self._start(number)
