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

    Attributes:
      notes: by page, what whoever filled a kept page has to say about it.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
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
        """The pages kept under `keys`, up to the first key that has none, with one more user each."""
        pages: list[int] = []
        for key in keys:
            page = self._kept.get(key)
            if page is None:
                break
            self._unused.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            pages.append(page)
        return pages

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
                del self._kept[self._keys.pop(page)]
                self.notes.pop(page, None)
            if page in self._unused:
                del self._unused[page]
                self._free.append(page)

    def clear(self) -> None:
        """Removes all pages from those that are kept."""
        self.forget([*self._keys])
