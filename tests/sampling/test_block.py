"""Blocks of drafts, without a draw: every block of a tiny vocabulary, with its probability."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import DraftVocabulary
from jaxspec.sampling.block import log_acceptance, log_prefixes
from jaxspec.sampling.rejection import _log_proposal, _log_residual


@dataclass
class Case:
    """Random P and q for every context of up to K tokens, as logits, and all V**K blocks.

    Attributes:
      count: drafts of a block that are real.
      target_ids: what can be drafted.
    """

    rng: np.random.Generator
    vocabulary: int = 4
    num_drafts: int = 3
    count: int = 3
    target_ids: tuple[int, ...] = (0, 1, 2, 3)
    scale: float = 2.0
    masked: bool = False

    def __post_init__(self):
        self.contexts = [
            prefix for n in range(self.num_drafts + 1) for prefix in product(range(self.vocabulary), repeat=n)
        ]
        size = len(self.contexts), self.vocabulary
        p = self.scale * self.rng.normal(size=size)
        if self.masked:  # as by top-k: some tokens have no probability, but never all
            p[np.arange(size[0])[:, None], self.rng.integers(1, self.vocabulary, (size[0], 2))] = -np.inf
        q = self.scale * self.rng.normal(size=(size[0], len(self.target_ids)))
        self.p = dict(zip(self.contexts, p, strict=True))
        self.q = dict(zip(self.contexts, q, strict=True))
        self.blocks = list(product(self.target_ids, repeat=self.num_drafts))
        draft_ids = np.full(self.vocabulary, -1)
        draft_ids[list(self.target_ids)] = np.arange(len(self.target_ids))
        self.draft_ids = draft_ids
        is_whole = self.target_ids == tuple(range(self.vocabulary))
        self.draft_vocab = (
            None if is_whole else DraftVocabulary(jnp.asarray(self.target_ids), jnp.asarray(draft_ids))
        )

    def rows(self, table, length):
        """[blocks, length, ...] of the contexts within every block."""
        return np.asarray([[table[block[:i]] for i in range(length)] for block in self.blocks], np.float32)

    @cached_property
    def chance(self):
        """P of every token after every context, by context."""
        return {context: np.exp(logits - _norm(logits)) for context, logits in self.p.items()}

    @cached_property
    def drawn(self):
        """Chance of every block's first `count` drafts; later ones are as if all were equally likely."""
        later = self.num_drafts - self.count
        return np.array(
            [
                np.prod(
                    [
                        np.exp(self.q[block[:i]][self.draft_ids[block[i]]] - _norm(self.q[block[:i]]))
                        for i in range(self.count)
                    ]
                )
                / len(self.target_ids) ** later
                for block in self.blocks
            ]
        )

    @cached_property
    def log_ratio(self):
        rows, draft_rows = self.rows(self.p, self.num_drafts), self.rows(self.q, self.num_drafts)
        ids = np.asarray(self.blocks)
        return log_ratios(rows, draft_rows, ids[..., None], self.draft_ids[ids][..., None])

    @cached_property
    def log_chance(self):
        rows, draft_rows = self.rows(self.p, self.num_drafts), self.rows(self.q, self.num_drafts)
        count = np.full(len(self.blocks), self.count)
        return log_chances(self.log_ratio, count, rows, draft_rows, self.draft_vocab)

    @cached_property
    def accepted(self):
        """Chance of accepting 0 to `count` drafts of every block, [blocks, count + 1]."""
        kept = np.exp(np.asarray(self.log_chance, np.float64))[:, : self.count]
        kept = np.concatenate([np.ones((len(kept), 1)), kept], axis=1)
        none_longer = np.cumprod((1 - kept)[:, :0:-1], axis=1)[:, ::-1]
        return kept * np.concatenate([none_longer, np.ones((len(kept), 1))], axis=1)

    @property
    def mean_accepted(self):
        return self.drawn @ self.accepted @ np.arange(self.count + 1)

    @property
    def mean_accepted_one_by_one(self):
        """Leviathan et al., 2023."""
        kept = np.minimum(np.exp(np.asarray(self.log_ratio, np.float64)), 1)[:, : self.count]
        return self.drawn @ np.cumprod(kept, axis=1).sum(axis=1)

    @cached_property
    def recovered(self):
        """The distribution of the token after an accepted prefix, by prefix."""
        log_prefix = np.asarray(jax.jit(log_prefixes)(self.log_ratio))
        after = {}
        for block, row in zip(self.blocks, log_prefix, strict=True):
            after |= {block[:count]: row[count] for count in range(self.count)}
        p, q = (np.asarray([table[context] for context in after], np.float32) for table in (self.p, self.q))
        kept = np.asarray(list(after.values()))[:, None]
        residuals = np.exp(np.asarray(log_residuals(kept, p, q, self.draft_vocab), np.float64))
        return dict(zip(after, residuals / np.maximum(residuals.sum(1, keepdims=True), 1e-30), strict=True))

    @property
    def emitted(self):
        """Chance of every continuation of `count` + 1 tokens: one step, then plain decoding."""
        law = np.zeros((self.vocabulary,) * (self.count + 1))
        for block, drawn, accepted in zip(self.blocks, self.drawn, self.accepted, strict=True):
            for count, chance in enumerate(accepted * drawn):
                context = block[:count]
                after = self.chance[context] if count == self.count else self.recovered[context]
                for token in range(self.vocabulary):
                    rest = self.law((*context, token), self.count - count)
                    law[(*context, token)] += chance * after[token] * rest
        return law

    def law(self, context, length):
        """Chance of every continuation by plain decoding, [V] * length."""
        law = np.ones((self.vocabulary,) * length)
        for tail in product(range(self.vocabulary), repeat=length):
            law[tail] = np.prod([self.chance[context + tail[:i]][tail[i]] for i in range(length)])
        return law


# Compiled, as every operation by itself would be, for every shape.
@jax.jit
def log_ratios(rows, draft_rows, ids, draft_ids):
    log_p, log_q = jax.nn.log_softmax(rows), jax.nn.log_softmax(draft_rows)
    return (jnp.take_along_axis(log_p, ids, -1) - jnp.take_along_axis(log_q, draft_ids, -1))[..., 0]


@jax.jit
def log_chances(log_ratio, count, rows, draft_rows, draft_vocab):
    norm, draft_norm = (jax.nn.logsumexp(each, axis=-1) for each in (rows, draft_rows))
    return log_acceptance(log_prefixes(log_ratio), count, rows, norm, draft_rows, draft_norm, draft_vocab)


@jax.jit
def log_residuals(kept, p, q, draft_vocab):
    return _log_residual(kept + jax.nn.log_softmax(p), _log_proposal(q, draft_vocab))


def _norm(logits):
    return np.log(np.exp(logits).sum())


def cases(number, **changes):
    for seed in range(number):
        yield Case(np.random.default_rng(seed), scale=(0.5, 1, 2, 4)[seed % 4], **changes)


KINDS = {
    "one vocabulary": {},
    "a smaller draft vocabulary": {"target_ids": (1, 3)},
    "in another order": {"target_ids": (3, 0, 2)},
    "masked": {"masked": True},
    "masked, a smaller draft vocabulary": {"masked": True, "target_ids": (0, 2, 3)},
    "fewer drafts than columns": {"count": 2},
    "one draft": {"num_drafts": 1, "count": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_distribution_is_the_targets(kind):
    for case in cases(4, **KINDS[kind]):
        np.testing.assert_allclose(case.drawn.sum(), 1, rtol=1e-6)
        np.testing.assert_allclose(case.emitted, case.law((), case.count + 1), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_fewer_drafts_are_accepted_than_one_by_one(kind):
    gains = [case.mean_accepted - case.mean_accepted_one_by_one for case in cases(40, **KINDS[kind])]
    assert min(gains) > -1e-6
    if kind == "one draft":
        assert max(gains) < 1e-6
    else:
        assert max(gains) > 0.02


def test_the_papers_example():
    """Section 2: two tokens, two drafts, 10/9 accepted one by one and 11/9 as a block."""
    case = Case(np.random.default_rng(0), vocabulary=2, num_drafts=2, count=2, target_ids=(0, 1))
    case.p = dict.fromkeys(case.contexts, np.log([1 / 3, 2 / 3]))
    case.q = dict.fromkeys(case.contexts, np.log([2 / 3, 1 / 3]))
    assert case.mean_accepted_one_by_one == pytest.approx(10 / 9, rel=1e-5)
    assert case.mean_accepted == pytest.approx(11 / 9, rel=1e-5)
    np.testing.assert_allclose(case.emitted, case.law((), 3), atol=1e-6)


def test_one_draft_is_accepted_by_its_ratio():
    for case in cases(8, num_drafts=1, count=1):
        np.testing.assert_array_equal(case.log_chance, np.minimum(case.log_ratio, 0))


def test_a_target_that_drafts_for_itself_is_always_accepted():
    for case in cases(8):
        case.q = case.p
        np.testing.assert_array_equal(case.log_chance, 0)
