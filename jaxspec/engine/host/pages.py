"""Allocates the pages of the cache, on the host, and keeps full ones for requests with the same prefix."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any


def page_keys(tokens: Sequence[int], page_size: int, before: bytes = b"") -> list[bytes]:
    """The keys of the full pages of a text, as far as the token behind a page is known.

    A key is a hash, 16 bytes, of all that a page was computed from: the tokens before it, its own, and the
    one behind it. A drafter's row may depend on the token that follows, so two texts that differ only behind
    the page have a different last row.

    Args:
      tokens: the text, from the start of a page on.
      before: the key of the page before it; empty for the first page.
    """
    words = array("i", tokens)
    data, page, word = words.tobytes(), page_size * words.itemsize, words.itemsize
    keys = []
    for end in range(page, len(data), page):
        before = blake2b(before + data[end - page : end + word], digest_size=16).digest()
        keys.append(before)
    return keys


class PagePool:
    """Hands out pages 1 to num_pages; page 0 has no owner.

    A full page, which is not written again, may be kept under a key of its content and shared by requests
    that need the same content. A kept page without users counts as free: when no other page is left, the
    least recently used one is given away.

    With recurrent layers, pages are of use only up to the last one behind which a copy of the state is kept.
    There are few copies, numbered from 0, and the least recently used one is given away. Programs run in the
    order of planning, so it is still read by what was planned before.

    Attributes:
      has_states: whether the model has recurrent layers.
      notes: by page, what whoever filled a kept page has to say about it.
    """

    def __init__(self, num_pages: int, page_size: int, num_states: int | None = None):
        """`num_states` copies of states; None for a model without recurrent layers."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.has_states = num_states is not None
        self._free_states = list(range(num_states or 0))[::-1]
        # By the key of the page before it, the least recently used first.
        self._states: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_pages, 0, -1))
        self._users: dict[int, int] = {}
        self._kept: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Kept pages without users, the least recently used first. In a plain dict, finding the first key
        # takes longer with every key that was deleted before it.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.notes: dict[int, Any] = {}

    @property
    def num_free(self) -> int:
        """Pages without users, kept ones included."""
        return len(self._free) + len(self._unused)

    def pages_for(self, num_positions: int) -> int:
        """The number of pages that hold so many positions."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages.

        Raises:
          ValueError: fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} free")
        if count > len(self._free):
            self.forget(list(islice(self._unused, count - len(self._free))))
        pages = [self._free.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The pages kept under `keys`, up to the first key that has none, with one more user each.

        With recurrent layers, up to the last of these behind which a state is kept.
        """
        pages: list[int] = []
        count = self.count_kept(keys)
        if self.has_states:
            count = next((end for end in range(count, 0, -1) if keys[end - 1] in self._states), 0)
        for key in keys[:count]:
            page = self._kept[key]
            self._unused.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            pages.append(page)
        return pages

    def count_kept(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys have a page."""
        return next((i for i, key in enumerate(keys) if key not in self._kept), len(keys))

    def state(self, key: bytes) -> int:
        """The copy of the state behind the page under `key`, which `share` has found."""
        self._states.move_to_end(key)
        return self._states[key]

    def keep_state(self, key: bytes) -> int | None:
        """A copy to be filled with the state behind the page under `key`; None if none is needed."""
        if key in self._states or key not in self._kept:
            return None
        if not self._free_states and self._states:
            self._free_states.append(self._states.popitem(last=False)[1])
        if not self._free_states:
            return None
        self._states[key] = self._free_states.pop()
        return self._states[key]

    def forget_state(self, key: bytes) -> None:
        """Gives away the copy of the state behind the page under `key`, if there is one."""
        if key in self._states:
            self._free_states.append(self._states.pop(key))

    def keep(self, page: int, key: bytes, note: Any = None) -> None:
        """Keeps a page that is in use under `key`, unless another page is kept under it."""
        if key not in self._kept:
            self._kept[key], self._keys[page] = page, key
            if note is not None:
                self.notes[page] = note

    def release(self, pages: Sequence[int]) -> None:
        """Takes pages, in the order of their text, back from one user."""
        # The last page of a text is given away first: a page is of use only with those before it.
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Removes pages from those that are kept; their users still have them."""
        for page in pages:
            if page in self._keys:
                key = self._keys.pop(page)
                del self._kept[key]
                self.forget_state(key)
                self.notes.pop(page, None)
            if page in self._unused:
                del self._unused[page]
                self._free.append(page)

    def clear(self) -> None:
        """Removes all pages from those that are kept."""
        self.forget([*self._keys])
