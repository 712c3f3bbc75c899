import queue
import threading
from contextlib import closing

import pytest

from jaxspec.service.batch.read_ahead import ReadAhead


def test_items_come_in_order_and_then_nothing():
    with closing(ReadAhead(range(50), 3)) as items:
        assert [items.take(wait=True) for _ in range(50)] == list(range(50))
        assert items.take(wait=True) is None
        assert items.is_done


def test_no_more_is_read_than_was_asked_for():
    seen = []
    source = (seen.append(i) or i for i in range(100))
    with closing(ReadAhead(source, 4)) as items:
        assert items.take(wait=True) == 0
        assert items.take(wait=True) == 1
        # What was taken, what is ready, and the one that waits for room.
        assert len(seen) <= 2 + 4 + 1


def test_a_slow_source_is_not_waited_for():
    source = queue.Queue()
    with closing(ReadAhead(iter(source.get, None), 4)) as items:
        assert items.take(wait=False) is None
        assert not items.is_done
        source.put(7)
        assert items.take(wait=True) == 7
        source.put(None)
        assert items.take(wait=True) is None
        assert items.is_done


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield 1
        raise OSError("gone")

    with closing(ReadAhead(source(), 4)) as items:
        assert items.take(wait=True) == 1
        with pytest.raises(OSError, match="gone"):
            items.take(wait=True)
        assert items.take(wait=True) is None


def test_closing_ends_the_thread_that_waits_for_room():
    before = set(threading.enumerate())
    items = ReadAhead(range(100), 2)
    (thread,) = set(threading.enumerate()) - before
    assert items.take(wait=True) == 0
    assert thread.is_alive()
    items.close()
    thread.join(30)
    assert not thread.is_alive()
    assert items.is_done
    assert items.take(wait=True) is None
