"""The process of one replica: an engine that receives rows through a socket and sends back answers.

It ends after its last row, or immediately if the parent process (`replicas.py`) ends.
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

from jaxspec.engine import Engine
from jaxspec.errors import OneLineError, one_line
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.run import BatchRun


@dataclass(frozen=True)
class Work:
    """The first message to a replica.

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


def main(descriptor: int) -> None:
    """Runs a replica.

    Args:
      descriptor: number of the socket's file descriptor.
    """
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
    """Reads continuously, so that the parent's writes never block and its end is noticed at once."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
