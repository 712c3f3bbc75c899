"""Reading ahead, so that a slow input does not block the engine."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Items of an iterable, read ahead by a separate thread."""

    def __init__(self, items: Iterable[T], size: int, *, on_change: Callable[[], object] | None = None):
        """Starts reading.

        Args:
          items: the iterable.
          size: the most items to hold that have not been taken.
          on_change: called in the reading thread after every item read, and after the last one.
        """
        self._items = items
        self._size = size
        self._ready: deque[T] = deque()
        self._on_change = on_change or (lambda: None)
        self._error: BaseException | None = None
        self._is_done = False
        self._changed = threading.Condition()
        # A thread that waits for a pipe cannot be stopped; a daemon ends with the process.
        threading.Thread(target=self._read, name="jaxspec-input", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether all items have been taken, and an error has been raised if there was one."""
        with self._changed:
            return self._is_done and not self._ready and self._error is None

    def take(self, *, wait: bool) -> T | None:
        """The next item; None after the last one and, without `wait`, if none is ready.

        Raises:
          The exception that reading raised, after all items read before it.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._ready or self._is_done)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Stops reading after the current item."""
        with self._changed:
            self._is_done = True
            self._ready.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        error = None
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._size or self._is_done)
                    if self._is_done:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
                self._on_change()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error = error
            self._is_done = True
            self._changed.notify_all()
        self._on_change()
