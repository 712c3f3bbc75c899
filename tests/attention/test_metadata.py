"""Attention metadata: where rows write and what they see."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import FullAttention, PageTable, RowBlock, SlidingWindow, build_metadata

PAGE = 4
TABLE = jnp.array([[5, 2, 7], [3, 0, 0]], jnp.int32)


def build(positions, valid=None, kind=FullAttention()):  # noqa: B008
    positions = jnp.asarray(positions, jnp.int32)
    valid = jnp.ones(positions.shape, bool) if valid is None else jnp.asarray(valid)
    return built(kind, RowBlock(positions, valid, PageTable(TABLE, PAGE)))


@partial(jax.jit, static_argnums=0)
def built(kind, block):
    return build_metadata([kind], block)[kind]


def test_rows_write_to_the_page_of_their_position():
    metadata = build([[0, 3, 4, 11], [0, 1, 2, 3]])
    assert metadata.slots.tolist() == [[20, 23, 8, 31], [12, 13, 14, 15]]
    np.testing.assert_array_equal(metadata.page_table, TABLE)


def test_full_attention_sees_all_positions_up_to_the_rows_own():
    metadata = build([[0, 3, 4, 11], [0, 1, 2, 3]])
    assert metadata.first.tolist() == [[0] * 4] * 2
    assert metadata.last.tolist() == [[0, 3, 4, 11], [0, 1, 2, 3]]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_window_sees_its_last_positions(size):
    positions = np.array([[0, 3, 4, 11], [0, 1, 2, 3]])
    metadata = build(positions, kind=SlidingWindow(size))
    np.testing.assert_array_equal(metadata.first, np.maximum(positions - size + 1, 0))
    np.testing.assert_array_equal(metadata.last, positions)


@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(3)])
def test_rows_that_are_not_valid_write_to_page_0_and_see_nothing(kind):
    metadata = build([[5, 6], [0, 1]], valid=[[True, False], [False, False]], kind=kind)
    assert metadata.slots[0, 0] == 2 * PAGE + 1
    hidden = np.array([[False, True], [True, True]])
    assert (np.asarray(metadata.slots)[hidden] < PAGE).all()
    assert (np.asarray(metadata.last)[hidden] < np.asarray(metadata.first)[hidden]).all()


@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(3)])
def test_rows_past_a_slots_pages_write_to_page_0_and_see_nothing(kind):
    """Drafts beyond the last token that a request may emit: past the table, or at an entry of 0."""
    metadata = build([[11, 12, 40], [3, 4, 8]], kind=kind)
    assert metadata.slots[:, 0].tolist() == [7 * PAGE + 3, 3 * PAGE + 3]
    assert metadata.last[:, 0].tolist() == [11, 3]
    assert (metadata.slots[:, 1:] < PAGE).all()
    assert (metadata.last[:, 1:] < metadata.first[:, 1:]).all()


def test_every_kind_of_a_network_gets_its_own():
    kinds = (FullAttention(), SlidingWindow(2), FullAttention(), SlidingWindow(3))
    positions = jnp.array([[7]])
    metadata = build_metadata(kinds, RowBlock(positions, positions >= 0, PageTable(TABLE[:1], PAGE)))
    assert {kind: int(m.first[0, 0]) for kind, m in metadata.items()} == {
        FullAttention(): 0,
        SlidingWindow(2): 6,
        SlidingWindow(3): 5,
    }


def test_it_follows_the_position_inside_a_compiled_loop():
    """What a draft loop relies on: iteration i gets the metadata of position 5 + i."""

    @jax.jit
    def loop(page_table):
        def body(i, found):
            positions = jnp.full((1, 1), 5, jnp.int32) + i
            kind = SlidingWindow(3)
            m = build_metadata([kind], RowBlock(positions, positions >= 0, page_table))[kind]
            return found.at[i].set(jnp.stack([m.slots, m.first, m.last]).ravel())

        return jax.lax.fori_loop(0, 4, body, jnp.zeros((4, 3), jnp.int32))

    assert loop(PageTable(TABLE[:1], PAGE)).tolist() == [[9, 3, 5], [10, 4, 6], [11, 5, 7], [28, 6, 8]]


def test_a_kind_without_a_builder_is_refused():
    with pytest.raises(TypeError, match="no attention metadata builder for 'latent'"):
        build([[0], [0]], kind="latent")
