"""Prompt lookup against a search written with Python's lists, over random histories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import PageTable
from jaxspec.drafters.base import Context
from jaxspec.drafters.kinds.ngram import NGramDrafter, lookup
from jaxspec.sampling import SamplingMode


def slow_lookup(tokens, num_drafts, max_ngram, min_ngram):
    """K drafts after a list of tokens, or None: the longest match, then the most recent one.

    What followed the match is followed through; where it reaches the end it goes on with the drafts.
    """
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                grown = list(tokens)
                for i in range(num_drafts):
                    grown.append(grown[start + size + i])
                return grown[len(tokens) :]
    return None


def run(histories, *, width, num_drafts, max_ngram=3, min_ngram=1, stale=0):
    """(drafts, count) of lists of tokens, in one batch; columns past each list hold `stale` tokens."""
    padded = np.full((len(histories), width), stale, np.int32)
    for row, history in enumerate(histories):
        padded[row, : len(history)] = history
    last = jnp.array([len(history) - 1 for history in histories])
    search = jax.jit(lookup, static_argnames=("num_drafts", "max_ngram", "min_ngram"))
    drafts, count = search(
        jnp.asarray(padded), last, num_drafts=num_drafts, max_ngram=max_ngram, min_ngram=min_ngram
    )
    return np.asarray(drafts), np.asarray(count)


@pytest.mark.parametrize(
    ("num_drafts", "max_ngram", "min_ngram"), [(1, 1, 1), (4, 3, 1), (5, 3, 2), (3, 4, 4), (7, 2, 1)]
)
@pytest.mark.parametrize("vocabulary", [2, 3, 12])
def test_random_histories(num_drafts, max_ngram, min_ngram, vocabulary):
    rng = np.random.default_rng(vocabulary)
    histories = [rng.integers(vocabulary, size=n).tolist() for n in rng.integers(1, 41, size=300)]
    settings = {"num_drafts": num_drafts, "max_ngram": max_ngram, "min_ngram": min_ngram}
    stale = int(rng.integers(vocabulary))
    drafts, count = run(histories, width=40, stale=stale, **settings)
    expected = [slow_lookup(history, **settings) for history in histories]
    assert count.tolist() == [0 if row is None else num_drafts for row in expected]
    for row, found in enumerate(expected):
        if found is not None:
            assert drafts[row].tolist() == found
    if vocabulary == 3:
        assert 0 < np.count_nonzero(count) < len(histories)


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6]),  # the most recent of two equal matches
        ([4, 1, 2, 7, 8, 2, 9, 1, 2], [7, 8, 2, 9]),  # the longer match before the more recent one
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # the match overlaps the end: it goes round
        ([5, 5], [5, 5, 5, 5]),
        ([3, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3], None),
        ([7], None),
    ],
)
def test_by_hand(history, drafts):
    found, count = run([history], width=12, num_drafts=4)
    assert count.tolist() == [0 if drafts is None else 4]
    assert slow_lookup(history, 4, 3, 1) == drafts
    if drafts:
        assert found[0].tolist() == drafts


def test_what_lies_past_the_last_token_is_never_matched_nor_drafted():
    history = [1, 2, 3, 4]
    assert run([history], width=12, num_drafts=3, stale=4)[1].tolist() == [0]
    drafts, _ = run([[8, 9, 8]], width=12, num_drafts=5, stale=-77)
    assert drafts[0].tolist() == [9, 8, 9, 8, 9]


def test_a_full_history_and_slots_that_are_idle():
    drafter = NGramDrafter(3)
    history = jnp.array([[1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]], jnp.int32)
    context = Context(
        hidden=jnp.zeros((2, 0)),
        history=history,
        length=jnp.array([5, 5]),
        active=jnp.array([True, False]),
        page_table=PageTable(jnp.zeros((2, 1), jnp.int32), 4),
        sampling=None,
    )
    proposal, cache = drafter.propose(None, context, (), num_drafts=3, mode=SamplingMode.TEMPERATURE)
    assert proposal.tokens[0].tolist() == [1, 2, 1]
    assert proposal.count.tolist() == [3, 0]
    assert proposal.logits is None
    assert cache == ()
    assert drafter.cache_shapes == ()
