"""Which pages of the cache belong to whom. The device never decides this."""


class PageAllocator:
    """Hands out pages 1..num_pages; page 0 is nobody's.

    A request's pages are reserved whole when it is admitted, for its prompt and everything it may emit:
    a running request can then never be without a page, so none is ever preempted, and the page table
    changes only when a slot is refilled. Rows past the reservation (drafts beyond the request's last
    token) write to page 0.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-num_positions // self.page_size)

    def can_allocate(self, num_positions: int) -> bool:
        return self.pages_for(num_positions) <= self.num_free

    def allocate(self, num_positions: int) -> list[int]:
        """Takes pages for so many positions; `can_allocate` must hold."""
        count = self.pages_for(num_positions)
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} free")
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Takes pages back."""
        self._free.extend(reversed(pages))
