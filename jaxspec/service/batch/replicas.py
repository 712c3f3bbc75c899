"""Batch runs with several engines, each in its own process."""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

from jaxspec.engine import Engine
from jaxspec.errors import one_line
from jaxspec.interpreter import python_interpreter
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.devices import child_environment
from jaxspec.service.batch.progress import Progress
from jaxspec.service.batch.read_ahead import ReadAhead
from jaxspec.service.batch.replica import Ready, Refused, Work
from jaxspec.service.batch.run import LOOK_AHEAD
from jaxspec.service.rows import Row, RowError

MAX_DEATHS = 3
"""The run fails if one replica dies so often without an answer, or so many replicas die with the same row."""

_PROGRAM = "import sys; from jaxspec.service.batch.replica import main; main(int(sys.argv[1]))"
_SECONDS_TO_END = 10.0
_MAX_OUTPUT = 2**16


class ReplicaError(RuntimeError):
    """A replica cannot be started or kept running; the message is one line."""


@dataclass
class _PendingRow:
    """A row in progress.

    Attributes:
      index: its number among all rows of the run.
      row: the row.
      deaths: number of replicas that died while they had it.
    """

    index: int
    row: Row
    deaths: int = 0


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
        environments: Sequence[Mapping[str, str]],
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
          environments: for each replica, environment variables to add to this process's own.
          rows: as in `BatchRun`, each with its own place.
          params: as in `BatchRun`, with the run's seed.
          imports: Python files that each process runs first.
          raw, keep_order: as in `BatchRun`.
          note: called with a line of text when a replica dies, and with what the first replica prints while
            loading.
        """
        super().__init__(keep_order=keep_order)
        self._work = Work(tuple(imports), load, params, raw)
        self._environments = environments
        self._rows = rows
        self._note = note
        self._events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._replicas: dict[int, _Replica] = {}
        self._deaths = [0] * len(environments)
        self._retries: deque[_PendingRow] = deque()
        self._num_read = 0
        self._has_started = False

    def start(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Loads all engines at the same time.

        Args:
          on_ready: called after each engine is loaded.

        Raises:
          ReplicaError: an engine cannot be loaded.
        """
        for number in range(len(self._environments)):
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
            replica.end_input()
        for replica in self._replicas.values():
            if replica.slots and not replica.pending:
                replica.wait()
            replica.kill()
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
            pending = self._retries.popleft() if self._retries else self._read()
            if pending is None:
                return
            max(free, key=lambda replica: replica.room).give(pending)

    def _read(self) -> _PendingRow | None:
        """The next row, or None if there is none now."""
        while self._num_read - self._num_yielded < self._look_ahead:
            row = self._source.take(wait=False)
            if row is None:
                return None
            self._num_read += 1
            if isinstance(row, Row):
                return _PendingRow(self._num_read - 1, row)
            self._done[self._num_read - 1] = row
        return None

    def _start(self, number: int) -> None:
        replica = _Replica(self._environments[number], self._work)
        self._replicas[number] = replica
        # A daemon, because it may still be reading when an interrupted process ends.
        Thread(target=self._listen, args=(number, replica), daemon=True).start()

    def _listen(self, number: int, replica: "_Replica") -> None:
        """Turns the messages and the end of a process into events."""
        try:
            while True:
                self._events.put(partial(self._take, number, replica, replica.connection.recv()))
        except (EOFError, OSError):
            self._events.put(partial(self._replace, number, replica))

    def _take(self, number: int, replica: "_Replica", message: Any) -> None:
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

    def _replace(self, number: int, replica: "_Replica") -> None:
        """Takes back the rows of a dead replica, and starts another instead."""
        death = f"replica {number + 1} of {len(self._environments)} died: {replica.wait_for_end()}"
        self._deaths[number] += 1
        for pending in replica.pending.values():
            pending.deaths += 1
        most = max(self._deaths[number], *(pending.deaths for pending in replica.pending.values()), 0)
        if most >= MAX_DEATHS:
            raise ReplicaError(f"{death}; that was {most} times in a row")
        self._note(f"{death}; its rows are answered again")
        self._retries.extendleft(reversed(replica.pending.values()))
        self._start(number)


class _Replica:
    """One replica's process.

    Attributes:
      connection: to the process.
      slots: requests that its engine runs at once; 0 until the engine is loaded.
      pending: the rows that it holds, by `Row.place`.
    """

    def __init__(self, environment: Mapping[str, str], work: Work):
        self.slots = 0
        self.pending: dict[str, _PendingRow] = {}
        self.connection, theirs = Pipe()
        self._output = TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [python_interpreter(), "-P", "-c", _PROGRAM, str(theirs.fileno())],
                env=child_environment(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self._send(work)

    @property
    def room(self) -> int:
        """How many more rows it may hold: enough that no slot is idle while an answer is on its way, but few
        enough to keep the replicas balanced."""
        return self.slots + -(-self.slots // 4) - len(self.pending) if self.slots else 0

    def give(self, pending: _PendingRow) -> None:
        """Sends a row. If the process has died, `_replace` takes the row back."""
        self.pending[pending.row.place] = pending
        self._send(pending.row)

    def last_output(self) -> str:
        """The end of its output on stdout and stderr."""
        size = os.fstat(self._output.fileno()).st_size
        # pread keeps the file position, which the process shares and writes at.
        text = os.pread(self._output.fileno(), min(size, _MAX_OUTPUT), max(size - _MAX_OUTPUT, 0))
        return text.decode("utf-8", "replace").strip()

    def end_input(self) -> None:
        """Tells the process that there are no more rows."""
        self._send(None)

    def wait(self) -> None:
        """Waits up to `_SECONDS_TO_END` seconds for the process to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)

    def wait_for_end(self) -> str:
        """Waits for a process that closed its connection; returns the cause of its death in one line."""
        self.wait()
        status = self._process.poll()
        words = self.last_output().splitlines()
        self.kill()
        if status is None:
            how = "it hangs"
        else:
            how = f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.strsignal(-status)}"
        return one_line(f"{how}; its last words: {words[-1]}" if words else how)

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # its listener notices that it is dead
            self.connection.send(message)
