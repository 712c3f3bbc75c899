"""Which pages of the cache belong to whom, and which are kept for what they hold; the host alone decides."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """What a full page holds, in 16 bytes: what all pages up to it were computed from.

    Args:
      before: the key of the page before it; empty for the first one.
      tokens: the page's own, and the one after them: a drafter's row may read the token that follows, so the
        last row of two texts that part behind a page differs.
    """
    return blake2b(before + array("i", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Hands out pages 1..num_pages; page 0 is nobody's.

    A page that nobody will write any more may be kept under a key that says what it holds. Whoever needs the
    same then shares it. A kept page without a user counts as free: it is given away when no other is left,
    the least recently used first.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))
        self._users: dict[int, int] = {}
        self._kept: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Kept and without a user, the least recently used first.
        self._unused: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Pages without a user, kept ones included."""
        return len(self._free) + len(self._unused)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes pages that nobody uses.

        Raises:
          ValueError: there are fewer.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} free")
        if count > len(self._free):
            self.forget([*self._unused][: count - len(self._free)])
        pages = [self._free.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, key: bytes) -> int | None:
        """The page that is kept under a key, with one user more; None if there is none."""
        page = self._kept.get(key)
        if page is not None:
            self._unused.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        return page

    def keep(self, page: int, key: bytes) -> None:
        """Keeps a page in use, unless another one holds the same."""
        if key not in self._kept:
            self._kept[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Takes pages back from one user."""
        # The last page of a text first, for the others are of use without it.
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Keeps these no longer; their users still have them."""
        for page in pages:
            if page in self._keys:
                del self._kept[self._keys.pop(page)]
            if page in self._unused:
                del self._unused[page]
                self._free.append(page)

    def clear(self) -> None:
        """Keeps nothing any longer."""
        self.forget([*self._keys])
