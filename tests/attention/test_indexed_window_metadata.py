"""Metadata of the indexed window: slots listed one by one, entries written at every r-th position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import IndexedWindow, PageTable, RowBlock, build_metadata

PAGE, WIDTH = 4, 5
TABLE = jnp.array([[5, 2, 7, 9, 1], [3, 8, 0, 0, 0]], jnp.int32)
KINDS = [IndexedWindow(1, 2), IndexedWindow(3, 4), IndexedWindow(7, 2), IndexedWindow(30, 4)]


def build(kind, positions, valid=None, table=TABLE):
    positions = jnp.asarray(positions, jnp.int32)
    valid = jnp.ones(positions.shape, bool) if valid is None else jnp.asarray(valid)
    return build_metadata([kind], RowBlock(positions, valid, PageTable(table, PAGE)))[kind]


def slot(b, position, per_page=PAGE):
    return int(TABLE[b, position // per_page]) * per_page + position % per_page


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_window_lists_the_slot_of_every_position_that_it_sees(kind):
    positions = [[0, 3, 4, 11, 19], [0, 1, 2, 3, 7]]
    metadata = build(kind, positions)
    for (b, q), position in np.ndenumerate(positions):
        seen = range(max(position - kind.size + 1, 0), position + 1)
        listed = metadata.window_slots[b, q].tolist()
        assert metadata.window_lengths[b, q] == len(seen)
        assert listed[: len(seen)] == [slot(b, p) for p in seen]
        assert all(0 <= other < PAGE for other in listed[len(seen) :])
        assert metadata.slots[b, q] == listed[len(seen) - 1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_entry_is_written_at_every_rth_position_and_seen_from_there_on(kind):
    positions = np.stack([np.arange(WIDTH * PAGE), np.arange(WIDTH * PAGE) % (2 * PAGE)])
    metadata = build(kind, positions)
    for (b, q), position in np.ndenumerate(positions):
        assert metadata.num_entries[b, q] == (position + 1) // kind.ratio
        if (position + 1) % kind.ratio:
            assert metadata.entry_slots[b, q] < PAGE // kind.ratio  # in page 0
            assert (metadata.entry_sources[b, q] < PAGE).all()
        else:
            sources = range(position - kind.ratio + 1, position + 1)
            assert metadata.entry_slots[b, q] == slot(b, position // kind.ratio, PAGE // kind.ratio)
            assert metadata.entry_sources[b, q].tolist() == [slot(b, p) for p in sources]
            assert metadata.entry_starts[b, q] == sources[0]


def test_a_ratio_of_one_has_a_window_and_no_entries():
    metadata = build(IndexedWindow(3), [[0, 3, 4], [0, 1, 2]])
    assert metadata.window_lengths.tolist() == [[1, 3, 3], [1, 2, 3]]
    assert (metadata.entry_slots < PAGE).all()
    assert (metadata.num_entries == 0).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_are_not_kept_write_to_page_0_and_see_nothing(kind):
    """Padding, finished slots, drafts past a request's pages or past the table, and before position 0."""
    positions = [[3, 7, 20, 99], [11, 8, 3, -1]]
    metadata = build(kind, positions, [[False, True, True, True], [True, True, False, True]])
    lost = np.array([[True, False, True, True], [True, True, True, True]])
    assert metadata.slots[0, 1] == slot(0, 7)
    for slots, per_page in (
        (metadata.slots, PAGE),
        (metadata.window_slots, PAGE),
        (metadata.entry_slots, PAGE // kind.ratio),
        (metadata.entry_sources, PAGE),
    ):
        outside = np.asarray(slots)[lost]
        assert ((outside >= 0) & (outside < per_page)).all()
    assert (np.asarray(metadata.window_lengths)[lost] == 0).all()
    assert (np.asarray(metadata.num_entries)[lost] == 0).all()


def test_it_follows_the_position_inside_a_compiled_loop():
    """Each iteration of a draft loop gets what the same row gets in one pass."""
    kind = IndexedWindow(3, 2)

    @jax.jit
    def loop(start):
        def body(i, found):
            metadata = build(kind, start + i, table=TABLE[:1])
            return jax.tree.map(lambda all_, one: all_.at[i].set(one[0, 0]), found, metadata)

        shapes = jax.eval_shape(lambda: build(kind, start, table=TABLE[:1]))
        found = jax.tree.map(lambda s: jnp.full((6, *s.shape[2:]), -1, jnp.int32), shapes)
        return jax.lax.fori_loop(0, 6, body, found)

    found, whole = loop(jnp.array([[5]])), build(kind, [range(5, 11)], table=TABLE[:1])
    for name in ("slots", "window_slots", "window_lengths", "entry_slots", "entry_sources", "num_entries"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[0])
