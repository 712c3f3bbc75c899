"""The process of one replica: an engine, rows that come through a socket, and answers that go back.

It ends when its rows do, or at once with the process that feeds it, `replicas.py`.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from jaxspec.batch.run import BatchRun
from jaxspec.engine import Engine
from jaxspec.errors import OneLineError, one_line
from jaxspec.sampling import SamplingParams


@dataclass(frozen=True)
class Work:
    """What a replica is told first.

    Attributes:
      imports: Python files to run before anything else.
      load: makes its engine.
      params: of every row, with the run's seed.
      raw: pass prompts that are text without the chat template.
    """

    imports: tuple[str, ...]
    load: Callable[[], Engine]
    params: SamplingParams
    raw: bool


@dataclass(frozen=True)
class Ready:
    """The engine is loaded; it runs so many requests at once."""

    slots: int


@dataclass(frozen=True)
class Refused:
    """The engine cannot be loaded, and why."""

    problem: str


def main(descriptor: int) -> None:
    """Serves the socket of this number."""
    connection = Connection(descriptor)
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    work = messages.get()
    try:
        for path in work.imports:
            runpy.run_path(path)
        engine = work.load()
    except Exception as error:
        name = "" if isinstance(error, OneLineError) else f"{type(error).__name__}: "
        problem = one_line(f"{name}{error}")
        connection.send(Refused(problem))
        sys.exit(problem)
    connection.send(Ready(max(engine.max_pending // 2, 1)))
    for ended in BatchRun(engine, iter(messages.get, None), work.params, raw=work.raw):
        connection.send(ended)


def _receive(connection: Connection, messages: SimpleQueue[Any]) -> None:
    """Reads all the time, so that nobody waits who writes, and the other process's end is seen at once."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
