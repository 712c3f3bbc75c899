"""Constraints of rows of logits against their definitions, for the rows of blocks and those of drafts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constraint_oracle import constrained

from jaxspec.config import EngineConfig
from jaxspec.engine.device.plan import Plan, Size, pack
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Dispatch, Running
from jaxspec.sampling import (
    Asked,
    Columns,
    Constrained,
    Constraints,
    DraftVocabulary,
    SamplingParams,
    required_constraints,
)

VOCABULARY, LONGEST, DRAFTS = 11, 40, 3
CONFIG = EngineConfig(page_size=8, prefill_chunk=4).resolve(backend="cpu", model_limit=LONGEST)
EVERY = Constraints.PENALTIES | Constraints.TOKENS | Constraints.SEQUENCES
STOP_TOKENS = (4, 7)
WAYS = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "logit_bias": {3: 40.0, 9: -7.5}},
    {"presence_penalty": 1.1, "frequency_penalty": -0.7},
    {"frequency_penalty": 0.3, "min_tokens": 12},
    {"bad_words": [[3], [5, 6], [1, 2, 1], [7, 7, 7, 7]]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "bad_words": [[8, 8]], "repetition_penalty": 1.2, "logit_bias": {8: 5.0}},
    # As many as there may be: the text follows right after the last one.
    {"bad_words": [[0] * 16] * 32, "no_repeat_ngram_size": 2},
    {"logit_bias": dict.fromkeys(range(VOCABULARY), 1.5), "min_tokens": 3, "presence_penalty": -2.0},
]


# Compiled, as every operation by itself would be, for every shape.
unpack = jax.jit(Plan.unpack, static_argnums=(1, 2))


@partial(jax.jit, static_argnames="is_draft")
def apply(slots, columns, logits, drafts, first=0, *, is_draft=False):
    return slots.over(columns).apply(logits, drafts, first, is_draft=is_draft)


def slots_of(rng, ways, constraints=EVERY):
    """The slots of requests that ask so, their texts and the lengths of their prompts."""
    texts = [rng.integers(VOCABULARY, size=length).tolist() for length in rng.integers(1, 30, size=len(ways))]
    # Texts that repeat themselves, also within the block.
    texts = [text[: len(text) // 2] * 2 if i % 2 and len(text) > 1 else text for i, text in enumerate(texts)]
    starts = [int(rng.integers(1, len(text) + 1)) for text in texts]
    starts[-1] = len(texts[-1])  # of the last of `WAYS`, a block then has the row where `min_tokens` ends
    batch = []
    for slot, (way, text, start) in enumerate(zip(ways, texts, starts, strict=True)):
        params = SamplingParams(**way)
        request = Request(text[:start], params, 10, STOP_TOKENS, 0, None, bad_words=params.bad_words)
        batch.append(Running(request, slot, [1], text, None))
    counts = [1] * len(batch)
    dispatch = Dispatch(batch, [True] * len(batch), True, 1, [], counts, counts, DRAFTS, counts)
    size = Size(len(batch), 0, width=DRAFTS + 1).doing(Asked(constraints=constraints))
    plan = unpack(jnp.asarray(pack(dispatch, size, CONFIG)), size, CONFIG)
    stale = rng.integers(VOCABULARY, size=(len(texts), LONGEST + 1))
    for row, text in zip(stale, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    slots = Constrained(
        plan.constraints, plan.stop_tokens, jnp.asarray(stale, jnp.int32), lengths, lengths[:0], lengths[:0]
    )
    return slots, texts, starts


def expected_rows(logits, texts, starts, drafts, ways, first=0):
    return np.array(
        [
            [
                constrained(row, [*text, *own[: first + j]], start, STOP_TOKENS, **way)
                for j, row in enumerate(rows)
            ]
            for rows, text, start, own, way in zip(logits, texts, starts, drafts.tolist(), ways, strict=True)
        ]
    )


@pytest.fixture(params=range(3))
def case(request):
    rng = np.random.default_rng(request.param)
    slots, texts, starts = slots_of(rng, WAYS)
    drafts = rng.integers(4, size=(len(WAYS), DRAFTS))
    logits = rng.normal(size=(len(WAYS), DRAFTS + 1, VOCABULARY)).astype(np.float32)
    return slots, texts, starts, drafts, logits


def test_rows_of_a_block_see_the_drafts_before_them(case):
    slots, texts, starts, drafts, logits = case
    found = apply(slots, Columns.of(logits, VOCABULARY), logits, drafts.astype(np.int32))
    expected = expected_rows(logits, texts, starts, drafts, WAYS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0], logits[0])
    assert np.isinf(expected).any()


def test_a_draft_is_drawn_from_a_row_that_saw_those_before_it(case):
    slots, texts, starts, drafts, logits = case
    columns = Columns.of(logits, VOCABULARY)
    for i in range(DRAFTS):
        # Later columns are not drawn yet.
        known = np.where(np.arange(DRAFTS) < i, drafts, 0)
        found = np.asarray(apply(slots, columns, logits[:, i : i + 1], known, jnp.int32(i), is_draft=True))
        expected = expected_rows(logits[:, i : i + 1], texts, starts, drafts, WAYS, first=i)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(np.where(found < -1e8, -np.inf, found), expected, rtol=1e-5, atol=1e-6)


def test_parts_of_a_vocabulary(case):
    """Of a split vocabulary, a device changes its own columns; of a draft vocabulary, those that it has."""
    slots, texts, starts, drafts, logits = case
    expected = expected_rows(logits, texts, starts, drafts, WAYS)
    none = jnp.zeros(0, jnp.int32)
    for start, size in ((0, 6), (6, 5)):
        columns = Columns(jnp.int32(start), none, none, size)
        found = apply(slots, columns, logits[..., start : start + size], drafts)
        np.testing.assert_allclose(found, expected[..., start : start + size], rtol=1e-5, atol=1e-6)
    drafted = np.array([1, 2, 3, 5, 8, 9])
    draft_ids = np.full(VOCABULARY, -1)
    draft_ids[drafted] = np.arange(len(drafted))
    vocabulary = DraftVocabulary(jnp.asarray(drafted), jnp.asarray(draft_ids))
    own = logits[..., drafted]
    found = apply(slots, Columns.of(own, len(drafted), vocabulary), own, drafts)
    np.testing.assert_allclose(found, expected[..., drafted], rtol=1e-5, atol=1e-6)
    second = apply(slots, Columns(jnp.int32(3), jnp.asarray(draft_ids), none, 3), own[..., 3:], drafts)
    np.testing.assert_allclose(second, expected[..., drafted[3:]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_a_program_with_the_kinds_that_are_asked_for_suffices(way):
    rng = np.random.default_rng(7)
    ways = [way, {}]
    slots, texts, starts = slots_of(rng, ways, required_constraints(SamplingParams(**way)))
    drafts = rng.integers(4, size=(2, DRAFTS))
    logits = rng.normal(size=(2, DRAFTS + 1, VOCABULARY)).astype(np.float32)
    found = apply(slots, Columns.of(logits, VOCABULARY), logits, drafts)
    np.testing.assert_allclose(
        found, expected_rows(logits, texts, starts, drafts, ways), rtol=1e-5, atol=1e-6
    )


def test_of_a_draft_vocabulary_that_is_banned_drafts_have_a_distribution():
    slots, _, _ = slots_of(np.random.default_rng(0), [{"bad_words": [[1], [2]]}])
    draft_ids = np.full(VOCABULARY, -1)
    draft_ids[[1, 2]] = 0, 1
    vocabulary = DraftVocabulary(jnp.array([1, 2]), jnp.asarray(draft_ids))
    logits, drafts = np.array([[[3.0, 1.0]]], np.float32), np.zeros((1, DRAFTS), np.int32)
    found = apply(slots, Columns.of(logits, 2, vocabulary), logits, drafts, is_draft=True)
    np.testing.assert_allclose(jax.nn.softmax(found), 0.5)


def test_what_asks_for_nothing_needs_no_constraint():
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "bad_words": []}
    assert required_constraints(SamplingParams(**neutral, min_tokens=0)) is Constraints.NONE
    kinds = [required_constraints(SamplingParams(**way)) for way in WAYS]
    assert kinds[:5] == [0, 1, 3, 1, 3]
    assert kinds[5:] == [4, 4, 4, 7, 4, 3]
