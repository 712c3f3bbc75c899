import random

import pytest

from jaxspec.engine.pages import PageAllocator


def test_pages_have_one_owner_and_page_zero_has_none():
    allocator = PageAllocator(num_pages=20, page_size=4)
    rng = random.Random(0)
    owned: list[list[int]] = []
    for _ in range(500):
        size = rng.randint(1, 24)
        if allocator.can_allocate(size) and rng.random() < 0.6:
            pages = allocator.allocate(size)
            assert len(pages) == -(-size // 4)
            owned.append(pages)
        elif owned:
            allocator.release(owned.pop(rng.randrange(len(owned))))
        taken = [page for pages in owned for page in pages]
        assert len(set(taken)) == len(taken)
        assert all(1 <= page <= 20 for page in taken)
        assert allocator.num_free == 20 - len(taken)


def test_a_page_more_than_there_are_is_refused():
    allocator = PageAllocator(num_pages=2, page_size=4)
    assert allocator.can_allocate(8)
    assert not allocator.can_allocate(9)
    with pytest.raises(ValueError, match="3 pages asked for, 2 free"):
        allocator.allocate(9)
