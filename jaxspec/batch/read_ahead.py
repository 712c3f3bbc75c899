"""Reading ahead, so that a slow input never keeps the engine waiting while there is work."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Items of an iterable, read by a thread of their own a few ahead of who takes them."""

    def __init__(self, items: Iterable[T], size: int, *, on_change: Callable[[], object] | None = None):
        """Starts reading.

        Args:
          size: items to read before the first is taken.
          on_change: called in the reading thread when there is an item more, and after the last one.
        """
        self._items = items
        self._size = size
        self._ready: deque[T] = deque()
        self._on_change = on_change or (lambda: None)
        self._error: BaseException | None = None
        self._is_done = False
        self._changed = threading.Condition()
        # Nothing can end a thread that waits for a pipe; as a daemon it does not outlive the process.
        threading.Thread(target=self._read, name="jaxspec-input", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether every item has been taken, or reading was ended by an error or by `close`."""
        with self._changed:
            return self._is_done and not self._ready and self._error is None

    def take(self, *, wait: bool) -> T | None:
        """The next item; None after the last one and, without `wait`, where none has been read yet.

        Raises:
          whatever reading raised, after the items before it.
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
        """Ends reading after the item that is being read."""
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
