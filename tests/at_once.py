"""Threads that run at once, and places where only one of them should be."""

import threading
from collections.abc import Callable
from typing import Any

MEETING = 0.3
"""Seconds for which a thread waits in a place for another one, which comes much sooner if it may."""


class Place:
    """Functions in which no two threads should be at once; whoever is in one waits there for another thread.

    Attributes:
      most: the most threads that were there at once.
      visits: how often one came.
    """

    def __init__(self) -> None:
        self.most = self.visits = 0
        self._inside, self._count, self._met = 0, threading.Lock(), threading.Event()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one of the place."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._count:
                self._inside += 1
                self.visits += 1
                self.most = max(self.most, self._inside)
            if self._inside > 1:
                self._met.set()
            self._met.wait(MEETING)
            try:
                return function(*args, **kwargs)
            finally:
                with self._count:
                    self._inside -= 1

        return call


def at_once(*calls: Callable[[], object]) -> list[Exception]:
    """Makes calls in threads of their own, of which none may take a minute; returns their errors."""
    errors: list[Exception] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors
