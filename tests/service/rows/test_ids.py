import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.service.rows import IdTable, hash_json

IDS = st.one_of(st.integers(-5, 5), st.integers(), st.text(max_size=3))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 2**64 - 1)), max_size=60), st.lists(IDS, max_size=10))
def test_it_is_a_dict_that_keeps_the_first(entries, others):
    table, expected = IdTable(), {}
    for row_id, number in entries:
        assert table.add(row_id, number) == expected.get(row_id)
        expected.setdefault(row_id, number)
    assert len(table) == len(expected)
    for row_id in [*others, *expected]:
        assert table.get(row_id) == expected.get(row_id)


def test_entries_that_share_a_bucket_are_told_apart_wherever_their_bytes_repeat(monkeypatch):
    """Hashes and numbers of few bytes in one bucket: a key is found at the edge of an entry alone."""

    def few_bytes(value, size):
        return b"\0\0" + bytes([value % 2]) * (size - 3) + bytes([value // 2])

    monkeypatch.setattr("jaxspec.service.rows.ids.hash_json", few_bytes)
    table = IdTable()
    numbers = [0, 2**64 - 1, 0x0101010101010101]
    for row_id in range(40):
        assert table.add(row_id, numbers[row_id % 3]) is None
    assert [table.get(row_id) for row_id in range(40)] == [numbers[i % 3] for i in range(40)]
    assert table.get(40) is None


def test_text_and_numbers_are_different_ids():
    table = IdTable()
    assert table.add(1, 7) is None
    assert table.add("1", 8) is None


def test_an_id_takes_few_bytes():
    table, sizes = IdTable(), []
    for _ in range(2):
        for _ in range(100_000):
            table.add(f"a rather long id of the row with the number {len(table)}", len(table))
        sizes.append(sum(map(sys.getsizeof, table._buckets.values())) + sys.getsizeof(table._buckets))
    # A set of these texts takes about 160.
    assert (sizes[1] - sizes[0]) / 100_000 < 40


def test_a_hash_is_of_the_value_and_not_of_its_writing():
    assert hash_json({"b": 1, "a": "é"}, 8) == hash_json({"a": "é", "b": 1}, 8)
    assert hash_json("\ud800", 8) != hash_json("?", 8)
