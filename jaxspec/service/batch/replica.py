"""One engine of several: what it does in its process, and how the run sees it, wherever that is."""

import runpy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxspec.engine import Engine
from jaxspec.errors import OneLineError, one_line
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.run import BatchRun
from jaxspec.service.rows import Row, RowError


@dataclass(frozen=True)
class Work:
    """What a replica is to do.

    Attributes:
      imports: Python files to run first.
      load: makes the engine.
      params: as in `BatchRun`, with the run's seed.
      raw: pass text prompts without the chat template.
    """

    imports: tuple[str, ...]
    load: Callable[[], Engine]
    params: SamplingParams
    raw: bool


@dataclass(frozen=True)
class Ready:
    """The engine is loaded and runs `slots` requests at once."""

    slots: int


@dataclass(frozen=True)
class Refused:
    """The engine could not be loaded, for the reason `problem`."""

    problem: str


Message = Ready | Refused | Answer | RowError


def messages(work: Work, rows: Iterator[Row]) -> Iterator[Message]:
    """What a replica says: `Ready` and the end of each row, or only `Refused`.

    Args:
      work: what it is to do.
      rows: those that it is given, as they come.
    """
    try:
        for path in work.imports:
            runpy.run_path(path)
        engine = work.load()
    except Exception as error:
        name = "" if isinstance(error, OneLineError) else f"{type(error).__name__}: "
        yield Refused(one_line(f"{name}{error}"))
        return
    yield Ready(max(engine.max_pending // 2, 1))
    yield from BatchRun(engine, rows, work.params, raw=work.raw)


@dataclass(frozen=True)
class PendingRow:
    """A row in progress.

    Attributes:
      index: its number among all rows of the run.
      row: the row.
      deaths: number of replicas that died while they had it.
    """

    index: int
    row: Row
    deaths: int = 0


class Replica(ABC):
    """One replica of a run. A subclass says where its process is.

    Attributes:
      slots: requests that its engine runs at once; 0 until the engine is loaded.
      pending: the rows that it holds, by `Row.place`.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.pending: dict[str, PendingRow] = {}

    @property
    def room(self) -> int:
        """How many more rows it may hold: enough that no slot is idle while an answer is on its way, but few
        enough to keep the replicas balanced."""
        return self.slots + -(-self.slots // 4) - len(self.pending) if self.slots else 0

    def give(self, pending: PendingRow) -> None:
        """Sends a row. If the process has died, the run takes the row back."""
        self.pending[pending.row.place] = pending
        self.send(pending.row)

    @abstractmethod
    def send(self, row: Row | None) -> None:
        """Sends a row, or None after the last; does nothing if the process has died."""

    @abstractmethod
    def messages(self) -> Iterator[Message]:
        """What `messages` yields there; ends when the process does, however that is."""

    @abstractmethod
    def cause_of_death(self) -> str:
        """Why there are no more messages, in one line; frees what the process has."""

    @abstractmethod
    def close(self) -> None:
        """Ends the process, immediately if it still holds rows; it has been sent None."""

    def last_output(self) -> str:
        """The end of what it has written to stdout and stderr, where that is not seen already."""
        return ""


@dataclass(frozen=True)
class Engines:
    """Where the engines of a run are.

    Attributes:
      backend: "cpu" or "gpu".
      description: their devices, as text.
      start: for each replica, what starts it; empty for one engine in this process.
    """

    backend: str
    description: str
    start: list[Callable[[Work], Replica]] = field(default_factory=list)
