"""States of recurrent layers: prompts in pieces, drafts that are accepted or not, copies, idle slots.

The rule is a small one, so that every state is known: it sums what it has read, and halves it before.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import (
    NumStates,
    PackedMemory,
    PagedMemory,
    PageTable,
    Recurrence,
    Recurrent,
    RowBlock,
    StatePlaces,
    StateShape,
    init_cache,
)
from jaxspec.sharding import make_mesh

HEADS, SLOTS, COPIES, DRAFTS = 2, 3, 2, 3
SHAPE = StateShape(HEADS, (((2,), "float32"),), 2)
NOWHERE = SLOTS + COPIES
KIND = (Recurrent(),)
TEXT = np.random.default_rng(0).normal(size=(12, HEADS, 2)).astype(np.float32)
"""The rows of a text."""


def step(states, rows):
    after = states[0] / 2 + rows
    return after, (after,)


def chunk(states, rows, valid):
    outputs = []
    for i in range(rows.shape[1]):
        output, after = step(states, rows[:, i])
        states = (jnp.where(valid[:, i, None, None], after[0], states[0]),)
        outputs.append(output)
    return jnp.stack(outputs, axis=1), states


def recurrence(rows):
    return Recurrence(SHAPE, jnp.asarray(rows.reshape(-1, HEADS, 2)), step, chunk)


def after(count, text=TEXT):
    """The state behind the first rows of a text, [H, 2]."""
    state = np.zeros((HEADS, 2), np.float32)
    for row in text[:count]:
        state = state / 2 + row
    return state


def new_cache():
    """A cache full of NaN."""
    cache = init_cache(
        [SHAPE],
        num_pages=2,
        page_size=4,
        dtype=jnp.float32,
        mesh=make_mesh(),
        num_states=NumStates(SLOTS, COPIES, DRAFTS),
    )
    return jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), cache)


def block(slots, starts, counts, width, *, source=None, copy=None, unapplied=()):
    place, index = jnp.asarray(slots, jnp.int32), np.arange(width, dtype=np.int32)[None]
    return RowBlock(
        jnp.asarray(np.asarray(starts, np.int32)[:, None] + index),
        jnp.asarray(index < np.asarray(counts)[:, None]),
        PageTable(jnp.zeros((len(slots), 1), jnp.int32), 4),
        states=StatePlaces(
            place,
            place if source is None else jnp.asarray(source, jnp.int32),
            jnp.asarray([NOWHERE] * len(slots) if copy is None else copy, jnp.int32),
            jnp.asarray(unapplied, jnp.int32),
        ),
    )


def rows_of(block, text=TEXT):
    """The text's rows of a block, NaN where they are not valid."""
    rows = text[np.minimum(np.asarray(block.positions), len(text) - 1)]
    return np.where(np.asarray(block.valid)[..., None, None], rows, np.nan)


def run(cache, *blocks, rows=None):
    rows = rows or [rows_of(each) for each in blocks]
    outputs, cache = recurred(cache, blocks, np.concatenate([each.reshape(-1, HEADS, 2) for each in rows]))
    return np.asarray(outputs), cache


@jax.jit
def recurred(cache, blocks, rows):
    outputs, memory = PagedMemory.build(KIND, cache, blocks).recur(0, recurrence(rows))
    return outputs, memory.caches


def read(cache, slot, count):
    """A prompt of so many rows in a slot."""
    return run(cache, block([slot], [0], [count], 8))[1]


def test_pieces_of_several_prompts_go_on_from_one_another():
    pieces = block([1, 1, 0, 1], [0, 4, 0, 8], [4, 4, 3, 2], 4)
    outputs, ((states, _),) = run(new_cache(), pieces)
    np.testing.assert_allclose(states[1], after(10), rtol=1e-6)
    np.testing.assert_allclose(states[0], after(3), rtol=1e-6)
    assert np.isnan(states[2:]).all()
    for group, (start, count) in enumerate([(0, 4), (4, 4), (0, 3), (8, 2)]):
        for i in range(count):
            np.testing.assert_allclose(outputs[4 * group + i], after(start + i + 1), rtol=1e-6)


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_only_accepted_drafts_are_in_the_next_state(accepted):
    """Behind a prompt of four, a step of a token and its drafts; the next step's text goes on differently."""
    cache = read(new_cache(), 0, 4)
    verify = block([0], [4], [DRAFTS + 1], DRAFTS + 1, unapplied=[0])
    outputs, cache = run(cache, verify)
    for i in range(DRAFTS + 1):
        np.testing.assert_allclose(outputs[i], after(5 + i), rtol=1e-6)
    other = np.concatenate([TEXT[: 5 + accepted], -TEXT[5 + accepted :]])
    again = block([0], [5 + accepted], [DRAFTS + 1], DRAFTS + 1, unapplied=[accepted])
    outputs, ((states, _),) = run(cache, again, rows=[rows_of(again, other)])
    for i in range(DRAFTS + 1):
        np.testing.assert_allclose(outputs[i], after(6 + accepted + i, other), rtol=1e-5)
    np.testing.assert_allclose(states[0], after(6 + accepted, other), rtol=1e-5)


def test_what_was_not_accepted_may_be_nan():
    cache = read(new_cache(), 0, 4)
    verify = block([0], [4], [2], 2, unapplied=[0])  # a smaller K: other inputs are NaN still
    rows = rows_of(verify)
    rows[:, 1] = np.nan
    _, cache = run(cache, verify, rows=[rows])
    outputs, _ = run(cache, block([0], [5], [1], 1, unapplied=[0]))
    np.testing.assert_allclose(outputs[0], after(6), rtol=1e-6)


def test_slots_that_do_not_decode_keep_their_states_and_inputs():
    cache = read(read(new_cache(), 0, 4), 2, 6)
    verify = block([0, 2, 2**31 - 1], [4, 6, 0], [3, 0, 0], 3, unapplied=[0, 0, 0])
    _, cache = run(cache, verify)
    ((states, kept),) = cache
    np.testing.assert_allclose(states[2], after(6), rtol=1e-6)
    assert np.isnan(kept[1:]).all()
    assert np.isnan(states[1]).all()
    assert np.isnan(states[SLOTS:]).all()


def test_a_step_that_decodes_and_reads_changes_each_slot_once():
    cache = read(new_cache(), 0, 4)
    decoding, prompt = block([0], [4], [2], 2, unapplied=[0]), block([1], [0], [5], 8)
    outputs, ((states, _),) = run(cache, decoding, prompt)
    np.testing.assert_allclose(states[0], after(5), rtol=1e-6)
    np.testing.assert_allclose(states[1], after(5), rtol=1e-6)
    np.testing.assert_allclose(outputs[1], after(6), rtol=1e-6)
    np.testing.assert_allclose(outputs[2 + 4], after(5), rtol=1e-6)


def test_a_copy_is_left_and_found_in_one_pass():
    first = SLOTS  # the first copy's place
    both = block([0, 1], [0, 4], [4, 3], 4, source=[0, first], copy=[first, NOWHERE])
    _, ((states, _),) = run(new_cache(), both)
    np.testing.assert_allclose(states[first], after(4), rtol=1e-6)
    np.testing.assert_allclose(states[1], after(7), rtol=1e-6)
    assert np.isnan(states[first + 1 :]).all()


def test_packed_texts_start_from_nothing_each():
    """Two texts of four and two rows behind one another, and padding."""
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1, 0]], jnp.int32)
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 0]], jnp.int32)
    rows = np.concatenate([TEXT[:4], TEXT[:2], TEXT[:1]])
    memory = PackedMemory(KIND, positions, segments)
    outputs, _ = jax.jit(lambda rows: memory.recur(0, recurrence(rows)))(rows)
    for i, count in enumerate([1, 2, 3, 4, 1, 2]):
        np.testing.assert_allclose(outputs[i], after(count), rtol=1e-6)


def test_rows_without_places_are_a_mistake():
    bare = replace(block([0], [0], [1], 1), states=None)
    with pytest.raises(AssertionError, match=r"need `RowBlock.states`"):
        PagedMemory.build(KIND, new_cache(), (bare,))
