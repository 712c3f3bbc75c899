"""Rows of several blocks in one forward pass: the same, bit for bit, as the blocks in passes of their own.

Slot 0 decodes in one block. Slot 1's prompt comes in pieces: two groups of one block and one of another.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import assert_close
from tiny_engines import ATTENTION as EVERY_KIND
from tiny_engines import DRAFTERS, KINDS, STATES, TinyEngines

from jaxspec.attention import (
    PagedMemory,
    PageTable,
    RowBlock,
    init_cache,
    join_rows,
    output_rows,
    row_positions,
    split_rows,
    take_rows,
)
from jaxspec.config import DrafterConfig
from jaxspec.drafters.base import Rows
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.files import open_checkpoint
from jaxspec.models.decoder import LAST_STREAMS
from jaxspec.models.target import load_target
from jaxspec.sharding import make_mesh

PAGE, PAGES, COMMITTED = 4, 6, 10
ATTENTION = [kind for kind in EVERY_KIND if kind not in STATES]
"""Those that take the pieces of a text in any order; for the others see `test_recurrent.py`."""
DRAFTED = [("full", name) for name in DRAFTERS if name not in ("ngram", "mtp", "gemma4_assistant")] + [
    ("sliding", "eagle3"),
    ("compressed", "mtp"),
    ("latent", "mtp"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The checkpoints of every kind of attention."""
    return {kind: TinyEngines(tmp_path_factory.mktemp("rows"), kind) for kind in ATTENTION}


@pytest.fixture(scope="module")
def target_of(tiny):
    """A target of every kind."""
    return {
        kind: load_target(open_checkpoint(tiny[kind].folders["target"]), dtype=jnp.float32)
        for kind in ATTENTION
    }


def table(*slots):
    pages = 1 + np.random.default_rng(1).permutation(2 * PAGES).reshape(2, PAGES)
    return PageTable(jnp.asarray(pages[list(slots)], jnp.int32), PAGE)


def block(slots, starts, width, counts):
    index = np.arange(width, dtype=np.int32)[None]
    positions = np.asarray(starts, np.int32)[:, None] + index
    return RowBlock(jnp.asarray(positions), jnp.asarray(index < np.array(counts)[:, None]), table(*slots))


BLOCKS = (
    block([1], [12], 5, [3]),
    block([0], [COMMITTED], 4, [4]),
    block([1, 1], [6, 0], 6, [6, 6]),
)
"""The last piece of the prompt comes first, so that it sees what blocks behind its own write."""
SLOTS = np.repeat([1, 0, 1], [5, 4, 12])


def piece(index, group):
    """One group's rows of one block."""
    masks = [np.zeros(b.shape, bool) for b in BLOCKS]
    masks[index][group] = True
    return masks


PIECES = [piece(2, 1), piece(1, 0), piece(2, 0), piece(0, 0)]
"""Which rows of the blocks each of the separate passes runs."""


def only(rows):
    return tuple(replace(b, valid=b.valid & m) for b, m in zip(BLOCKS, rows, strict=True))


def with_outputs(blocks):
    """Of a prompt's blocks, one row of each group; of the decoding block, all rows."""
    last, decoding, first = blocks
    return (replace(last, output=jnp.array([2])), decoding, replace(first, output=jnp.array([5, 1])))


OUTPUTS = [2, *range(5, 9), 9 + 5, 15 + 1]
"""The flat rows that these are."""


def valid_rows(blocks):
    return np.asarray(join_rows(b.valid for b in blocks))


def new_cache(shapes):
    cache = init_cache(shapes, num_pages=1 + 2 * PAGES, page_size=PAGE, dtype=jnp.float32, mesh=make_mesh())
    return jax.tree.map(lambda layer: jnp.full_like(layer, jnp.nan), cache)


def tokens_at(positions, slots):
    """Random texts, one per slot."""
    texts = np.random.default_rng(2).integers(48, size=(2, PAGES * PAGE + 1)).astype(np.int32)
    return texts[slots, positions]


@partial(nnx.jit, static_argnames="capture")
def run(target, tokens, blocks, cache, capture=None):
    memory = PagedMemory.build(target.kinds, cache, blocks)
    capture = tuple(range(len(target.kinds) + 1)) if capture is None else capture
    hidden, captured, memory = target(tokens, row_positions(blocks), memory, capture=capture)
    return (hidden, *captured), memory.caches


def committed(target):
    """A cache that holds slot 0's committed tokens."""
    before = (block([0], [0], COMMITTED, [COMMITTED]),)
    tokens = jnp.asarray(tokens_at(np.arange(COMMITTED), np.zeros(COMMITTED, int)))
    return run(target, tokens, before, new_cache(target.cache_shapes))[1]


def assert_same_cache(one, other):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours[1:], theirs[1:])  # page 0 is nobody's


@pytest.mark.parametrize("kind", ATTENTION)
def test_blocks_in_one_pass_equal_passes_of_their_own(target_of, kind):
    target = target_of[kind]
    tokens = jnp.asarray(tokens_at(np.asarray(row_positions(BLOCKS)), SLOTS))
    start = committed(target)
    together, cache = run(target, tokens, BLOCKS, start)
    one_by_one = start
    for rows in PIECES:
        blocks = only(rows)
        apart, one_by_one = run(target, tokens, blocks, one_by_one)
        seen = valid_rows(blocks)
        for ours, theirs in zip(together, apart, strict=True):
            np.testing.assert_array_equal(ours[seen], theirs[seen])
    assert_same_cache(cache, one_by_one)


@pytest.mark.parametrize("kind", ATTENTION)
def test_pieces_of_a_prompt_equal_the_prompt_in_one_group(target_of, kind):
    target = target_of[kind]
    positions = np.asarray(row_positions(BLOCKS))
    tokens = jnp.asarray(tokens_at(positions, SLOTS))
    (pieces, *_), _ = run(target, tokens, BLOCKS, committed(target))
    prompt = np.flatnonzero((SLOTS == 1) & valid_rows(BLOCKS))
    prompt = prompt[np.argsort(positions[prompt])]
    whole = (block([1], [0], 15, [15]),)
    (alone, *_), _ = run(target, tokens[prompt], whole, new_cache(target.cache_shapes))
    assert_close(pieces[prompt], np.asarray(alone))


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_last_layer_computes_the_rows_whose_output_is_needed(target_of, kind):
    target = target_of[kind]
    tokens = jnp.asarray(tokens_at(np.asarray(row_positions(BLOCKS)), SLOTS))
    start = committed(target)
    streams = tuple(range(len(target.kinds)))
    (every, *captured), cache = run(target, tokens, BLOCKS, start, streams)
    (needed, *others), narrow = run(target, tokens, with_outputs(BLOCKS), start, streams)
    assert_close(needed, np.asarray(every)[OUTPUTS])
    for ours, theirs in zip(others, captured, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_same_cache(narrow, cache)


@nnx.jit
def refresh(drafter, target, rows, cache):
    return drafter.refresh(target, rows, cache)


@pytest.mark.parametrize(("kind", "name"), DRAFTED)
def test_a_drafter_takes_in_blocks_as_it_takes_in_each_alone(tiny, target_of, kind, name):
    target = target_of[kind]
    config = DrafterConfig(KINDS.get(name, name), 3, source=str(tiny[kind].folders[name]))
    drafter = load_drafter(config, target, Build(jnp.dtype(jnp.float32)))
    positions = np.asarray(row_positions(BLOCKS))
    rng = np.random.default_rng(3)
    # A layer that reads all residual streams keeps them, too.
    width = drafter.needs.state_size if drafter.needs.capture == (LAST_STREAMS,) else 32
    features = rng.normal(size=(1 + len(drafter.needs.capture), len(positions), width)).astype(np.float32)

    def rows(blocks):
        return Rows(
            jnp.asarray(tokens_at(positions, SLOTS)),
            jnp.asarray(tokens_at(positions + 1, SLOTS)),
            jnp.asarray(features[0]),
            tuple(map(jnp.asarray, features[1:])),
            blocks,
        )

    cache = new_cache(drafter.cache_shapes)
    # What slot 0 had before does not matter, as long as it is there.
    cache = jax.tree.map(lambda layer: jnp.zeros_like(layer).at[table(1).pages[0]].set(jnp.nan), cache)
    together, whole = refresh(drafter, target, rows(BLOCKS), cache)
    assert together.shape == (len(positions), drafter.needs.state_size)
    for part in PIECES:
        blocks = only(part)
        apart, cache = refresh(drafter, target, rows(blocks), cache)
        seen = valid_rows(blocks)
        np.testing.assert_array_equal(together[seen], apart[seen])
    assert np.isfinite(together[valid_rows(BLOCKS)]).all()
    assert_same_cache(whole, cache)
    needed, narrow = refresh(drafter, target, rows(with_outputs(BLOCKS)), whole)
    assert needed.shape == (len(OUTPUTS), drafter.needs.state_size)
    if drafter.needs.state_size:
        assert_close(needed, np.asarray(together)[OUTPUTS])
    assert_same_cache(narrow, whole)


def test_rows_whose_output_is_needed():
    assert output_rows(BLOCKS) is None
    rows = output_rows(with_outputs(BLOCKS))
    assert rows.tolist() == OUTPUTS
    assert take_rows(jnp.arange(len(SLOTS)), rows).tolist() == OUTPUTS
    positions = join_rows(b.outputs.positions for b in with_outputs(BLOCKS))
    assert positions.tolist() == np.asarray(row_positions(BLOCKS))[OUTPUTS].tolist()


def test_splitting_gives_back_what_was_joined():
    parts = [jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(20.0).reshape(1, 5, 4), jnp.zeros((0, 7, 4))]
    joined = join_rows(parts)
    assert joined.shape == (11, 4)
    for part, expected in zip(split_rows(joined, [p.shape[:2] for p in parts]), parts, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_rows_of_one_block_are_neither_copied_nor_gathered():
    """A single block, the decode step's, is only reshaped."""

    def one(x):
        return join_rows(split_rows(x, [(2, 3)]))

    assert [str(e.primitive) for e in jax.make_jaxpr(one)(jnp.zeros((6, 4))).eqns] == ["reshape"] * 2
