import random
from collections import Counter, OrderedDict

import pytest

from jaxspec.engine.host.pages import PagePool, page_keys


def test_a_pages_users_are_those_that_took_it_and_page_zero_has_none():
    pool = PagePool(num_pages=20, page_size=4)
    rng = random.Random(0)
    owned: list[list[int]] = []
    holds: dict[bytes, int] = {}
    found = 0
    for _ in range(2000):
        key = bytes([rng.randrange(12)])
        used = {page for pages in owned for page in pages}
        action = rng.random()
        if action < 0.4 and pool.num_free:
            pages = pool.allocate(rng.randint(1, min(pool.num_free, 6)))
            # What somebody uses is not given away, whether it is kept or not.
            assert not used & set(pages)
            holds = {key: page for key, page in holds.items() if page not in pages}
            owned.append(pages)
        elif action < 0.5:
            # A key that no page is kept under ends the search.
            pages = pool.share([key, b"no such page", key])
            assert pages == ([holds[key]] if key in holds else [])
            if pages:
                found += pages[0] not in used
                owned.append(pages)
        elif action < 0.6 and owned:
            page = rng.choice(rng.choice(owned))
            if page not in holds.values():
                pool.keep(page, key)
                holds.setdefault(key, page)
        elif owned:
            pool.release(owned.pop(rng.randrange(len(owned))))
        taken = {page for pages in owned for page in pages}
        assert Counter(page for pages in owned for page in pages) == pool._users
        assert all(1 <= page <= 20 for page in taken)
        assert pool.num_free == 20 - len(taken)
    assert found > 10
    pool.clear()
    assert not any(pool.share([key]) for key in holds)


def test_what_was_used_last_is_given_away_last():
    pool = PagePool(num_pages=4, page_size=4)
    first, second = pool.allocate(2), pool.allocate(2)
    for page in (*first, *second):
        pool.keep(page, bytes([page]))
    pool.release(first)
    pool.release(second)
    # Of one text the last page goes first, since without the first one the last is found by nobody.
    assert [pool.allocate(1) for _ in range(4)] == [[first[1]], [first[0]], [second[1]], [second[0]]]


def test_the_copy_of_a_state_that_was_used_last_is_given_away_last():
    pool, keys = PagePool(num_pages=3, page_size=4, num_states=2), [b"a", b"b", b"c"]
    for page, key in zip(pool.allocate(3), keys, strict=True):
        pool.keep(page, key)
    first, second = pool.keep_state(b"a"), pool.keep_state(b"b")
    assert pool.state(b"a") == first  # somebody reads it
    assert pool.keep_state(b"c") == second
    assert [len(pool.share([key])) for key in keys] == [1, 0, 1]


class Counted(OrderedDict):
    """Counts the keys that iterators over it have yielded."""

    looked_at = 0

    def __iter__(self):
        for key in super().__iter__():
            self.looked_at += 1
            yield key


def test_giving_a_kept_page_away_looks_at_no_others():
    """It listed all of them: 50 ms a dispatch with 512 slots and 65,000 kept pages."""
    pool = PagePool(1000, 4)
    pages = pool.allocate(1000)
    for page in pages:
        pool.keep(page, page_keys([page] * 5, 4)[0])
    pool.release(pages)
    pool._unused = Counted(pool._unused)
    for _ in range(10):
        assert len(pool.allocate(2)) == 2
    assert pool._unused.looked_at <= 40


def test_a_key_tells_the_text_before_the_page_and_the_token_behind_it():
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 5]]
    keys = [page_keys(text, 2)[-1] for text in texts]
    others = [page_keys([9, *text[1:]], 2)[-1] for text in texts]
    assert len({*keys, *others}) == 6
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_keys_do_not_depend_on_how_much_of_a_text_is_known(page_size):
    text = list(range(100, 123))
    keys = page_keys(text, page_size)
    # The last page has no key yet: the token behind it is unknown.
    assert len(set(keys)) == len(keys) == (len(text) - 1) // page_size
    for known in range(len(keys) + 1):
        before = page_keys(text[: known * page_size + 1], page_size)
        behind = page_keys(text[known * page_size :], page_size, before[-1] if before else b"")
        assert before + behind == keys


def test_a_page_more_than_there_are_is_refused():
    pool = PagePool(num_pages=2, page_size=4)
    with pytest.raises(ValueError, match="3 pages asked for, 2 free"):
        pool.allocate(pool.pages_for(9))
    assert len(pool.allocate(pool.pages_for(8))) == 2
