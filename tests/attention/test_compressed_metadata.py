"""Metadata of windows and entries: slots listed one by one, entries written at every r-th position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import CompressedAttention, PageTable, RowBlock, build_metadata

PAGE, WIDTH = 4, 5
TABLE = jnp.array([[5, 2, 7, 9, 1], [3, 8, 0, 0, 0]], jnp.int32)
KINDS = [
    CompressedAttention(1, 2),
    CompressedAttention(3, 4, overlaps=True),
    CompressedAttention(7, 3, overlaps=True),
    CompressedAttention(30, 6),
]


def build(kind, starts, rows, valid=None, table=TABLE):
    """Of groups of consecutive rows."""
    positions = jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(rows, dtype=jnp.int32)
    valid = jnp.ones(positions.shape, bool) if valid is None else jnp.asarray(valid)
    return built(kind, RowBlock(positions, valid, PageTable(table, PAGE)))


@partial(jax.jit, static_argnums=0)
def built(kind, block):
    return build_metadata([kind], block)[kind]


def slot(b, position):
    return int(TABLE[b, position // PAGE]) * PAGE + position % PAGE


def entry_slot(b, end, ratio):
    return int(TABLE[b, end // PAGE]) * -(-PAGE // ratio) + end % PAGE // ratio


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_window_lists_the_slot_of_every_position_that_it_sees(kind):
    metadata = build(kind, [0, 0], 8)
    for b, position in np.ndindex(2, 8):
        seen = range(max(position - kind.window + 1, 0), position + 1)
        listed = metadata.window_slots[b, position].tolist()
        assert metadata.window_lengths[b, position] == len(seen)
        assert listed[: len(seen)] == [slot(b, p) for p in seen]
        assert all(0 <= other < PAGE for other in listed[len(seen) :])
        assert metadata.slots[b, position] == listed[len(seen) - 1]


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_entry_is_written_by_its_last_row_and_seen_from_there_on(kind, rows):
    """At every offset of a group of rows in an entry and in a page."""
    ratio = kind.ratio
    for start in range(WIDTH * PAGE - rows + 1):
        metadata = build(kind, [start], rows, table=TABLE[:1])
        ends = [p for p in range(start, start + rows) if (p + 1) % ratio == 0]
        assert metadata.written_entries.shape == (1, -(-rows // ratio))
        for i, found in enumerate(metadata.written_entries[0].tolist()):
            if i >= len(ends):
                assert found < -(-PAGE // ratio)  # in page 0
                assert not metadata.entry_seen[0, i].any()
                continue
            assert found == entry_slot(0, ends[i], ratio)
            assert metadata.entry_starts[0, i] == ends[i] - ratio + 1
            sources = [p for p in range(ends[i] - kind.num_sources + 1, ends[i] + 1) if p >= 0]
            seen = np.asarray(metadata.entry_seen[0, i])
            assert seen.tolist() == [False] * (len(seen) - len(sources)) + [True] * len(sources)
            assert np.asarray(metadata.entry_sources[0, i])[seen].tolist() == [slot(0, p) for p in sources]
        assert metadata.num_entries[0].tolist() == [(start + q + 1) // ratio for q in range(rows)]
        every = [entry_slot(0, end, ratio) for end in range(ratio - 1, WIDTH * PAGE, ratio)]
        assert metadata.entries[0].tolist() == every
        assert len(set(every)) == len(every)


def test_a_ratio_of_one_has_a_window_and_no_entries():
    metadata = build(CompressedAttention(3), [0, 0], 4)
    assert metadata.window_lengths.tolist() == [[1, 2, 3, 3]] * 2
    assert metadata.written_entries.size == metadata.entries.size == metadata.entry_sources.size == 0
    assert (metadata.num_entries == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("start", "valid"),
    [(3, [False] * 6), (8, [True] * 6), (18, [True] * 6), (99, [True] * 6), (-7, [True] * 6)],
    ids=["not valid", "no page", "past the table", "far past it", "before position 0"],
)
def test_rows_that_are_not_kept_write_to_page_0_and_see_nothing(kind, start, valid):
    metadata = build(kind, [start], 6, [valid], table=TABLE[1:])
    for slots, per_page in (
        (metadata.slots, PAGE),
        (metadata.window_slots, PAGE),
        (metadata.written_entries, -(-PAGE // kind.ratio)),
        (metadata.entry_sources, PAGE),
    ):
        assert ((np.asarray(slots) >= 0) & (np.asarray(slots) < per_page)).all()
    assert (np.asarray(metadata.window_lengths) == 0).all()
    assert (np.asarray(metadata.num_entries) == 0).all()
    assert not metadata.entry_seen.any()


def test_it_follows_the_position_inside_a_compiled_loop():
    """Each iteration of a draft loop gets what the same row gets in one pass."""
    kind = CompressedAttention(3, 2, overlaps=True)

    @jax.jit
    def loop(start):
        def body(i, found):
            metadata = build(kind, start + i, 1, table=TABLE[:1])
            return jax.tree.map(lambda all_, one: all_.at[i].set(one[0, 0]), found, metadata)

        shapes = jax.eval_shape(lambda: build(kind, start, 1, table=TABLE[:1]))
        found = jax.tree.map(lambda s: jnp.full((6, *s.shape[2:]), -1, s.dtype), shapes)
        return jax.lax.fori_loop(0, 6, body, found)

    found, whole = loop(jnp.array([5])), build(kind, [5], 6, table=TABLE[:1])
    for name in ("slots", "window_slots", "window_lengths", "num_entries"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[0])
    # Rows 5, 7 and 9 end an entry each.
    for name in ("written_entries", "entry_sources", "entry_seen", "entry_starts"):
        np.testing.assert_array_equal(getattr(found, name)[::2], getattr(whole, name)[0])
    assert (found.written_entries[1::2] < PAGE).all()
