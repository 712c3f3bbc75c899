"""Threads that compile, and what does not wait for them.

XLA cannot be interrupted. So programs are compiled in threads that nobody has to wait for: an interrupt ends
the caller's wait at once, and `end_process` ends a process that was interrupted. Any other process waits for
them when it exits, because one that exits while XLA compiles may crash.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

_RUNNING: set[threading.Thread] = set()
_ABANDONED: set[threading.Thread] = set()
"""Those whose callers were interrupted."""
_IS_ENDING = threading.Event()


def start(function: Callable[[], Any], *, name: str = "jaxspec-compile") -> threading.Thread:
    """Runs a function in a thread of its own."""

    def run() -> None:
        try:
            function()
        finally:
            _RUNNING.discard(thread)
            _ABANDONED.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _RUNNING.add(thread)
    thread.start()
    return thread


class Compiling:
    """A function that runs in a thread of its own, for a caller that may be interrupted.

    The caller waits for `future` in a `with` block of this object.
    """

    def __init__(self, function: Callable[[], Any], *, name: str = "jaxspec-compile"):
        self.future = Future[Any]()

        def run() -> None:
            try:
                self.future.set_result(function())
            except BaseException as error:  # the caller waits for it
                self.future.set_exception(error)

        self._thread = start(run, name=name)

    def __enter__(self) -> "Compiling":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an interrupt of the caller, nobody waits for the thread any more."""
        if kind is not None and not issubclass(kind, Exception) and self._thread in _RUNNING:
            _ABANDONED.add(self._thread)


def interruptible(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that compiles, in a thread of its own, so that an interrupt does not wait for it."""
    with Compiling(partial(function, *arguments)) as compiling:
        result: Result = compiling.future.result()
    return result


def is_ending() -> bool:
    """Whether the process ends, so that nothing more is to be compiled."""
    return _IS_ENDING.is_set()


def end_process(status: int) -> None:
    """Ends this process at once if a thread compiles; otherwise returns."""
    if not _RUNNING:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is closed
            stream.flush()
    os._exit(status)


def _wait() -> None:
    """Waits for all threads, but not in a process that an interrupt of a waiting caller ends."""
    _IS_ENDING.set()
    if _ABANDONED and issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
        end_process(130)
    for thread in list(_RUNNING):
        thread.join()


# Exit handlers run last in, first out, so this one runs before JAX's.
atexit.register(_wait)
