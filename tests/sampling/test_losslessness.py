"""What comes out of drafting and verifying is distributed as the target, for the worst drafter."""

import itertools
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels import random
from jaxspec_kernels.argmax import gumbel_argmax
from jaxspec_kernels.gumbel_sample import gumbel_sample
from jaxspec_kernels.random import Purpose
from optimised import optimised

from jaxspec.sampling import DraftVocabulary, SamplingMode, process_logits, rejection, verify

TRIALS = 200_000


def propose(draft_logits, state, positions, draft_ids):
    """Draws one draft per column; the target ids of the drafts, and the logits they were drawn from."""
    slots, columns, vocabulary = draft_logits.shape
    buffers = jnp.zeros((slots, columns), jnp.int32), jnp.zeros((slots, columns, vocabulary))

    def draw(column, buffers):
        return gumbel_sample(
            draft_logits[:, column],
            state.temperature,
            state.seed,
            random.draft_position(positions[:, 0], column),
            column,
            *buffers,
            purpose=Purpose.DRAFT,
        )

    tokens, processed = jax.lax.fori_loop(0, columns, draw, buffers)
    return draft_ids[tokens], processed


def first_tokens(state, *, one_hot, draft_ids):
    """The first token of one step for each of TRIALS requests: draft = -target over 16 tokens, K = 2."""
    row = jnp.linspace(-2, 2, 16)
    logits = jnp.broadcast_to(row, (TRIALS, 3, 16))
    positions = jnp.arange(TRIALS)[:, None] % 7 + jnp.arange(3)
    draft_ids = jnp.asarray(draft_ids, jnp.int32)
    draft_vocab = DraftVocabulary(draft_ids, jnp.full(16, -1).at[draft_ids].set(jnp.arange(len(draft_ids))))

    def step(logits, state):
        drafts, processed = propose(-logits[:, :2, draft_ids], state, positions, draft_ids)
        verdict = verify(
            logits,
            drafts,
            jnp.full(TRIALS, 2),
            None if one_hot else processed,
            None if one_hot else draft_vocab,
            state,
            positions,
            mode=SamplingMode.TRUNCATED,
        )
        return jnp.where(verdict.accepted > 0, drafts[:, 0], verdict.token), verdict.accepted

    tokens, accepted = optimised(step)(logits, state)
    target = jax.nn.softmax(
        process_logits(row[None, None], jax.tree.map(lambda x: x[:1], state), mode=SamplingMode.TRUNCATED)
    )
    return np.bincount(tokens, minlength=16), target, accepted


PLAIN, TRUNCATED = {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}
SAME, SMALLER = range(16), (0, 2, 3, 7, 11, 14)


@pytest.mark.parametrize(
    ("one_hot", "draft_ids", "settings"),
    [
        pytest.param(False, SAME, PLAIN, id="true q"),
        pytest.param(True, SAME, PLAIN, id="one-hot"),
        pytest.param(False, SMALLER, PLAIN, id="true q of a smaller vocabulary"),
        pytest.param(False, SMALLER, TRUNCATED, id="true q of a smaller vocabulary, truncated"),
    ],
)
def test_narrow_vocabulary(one_hot, draft_ids, settings, sampling_state, chi_square_excess):
    state = sampling_state(TRIALS, **settings)
    counts, target, accepted = first_tokens(state, one_hot=one_hot, draft_ids=draft_ids)
    assert chi_square_excess(counts, target) < 1
    assert 0 < (accepted > 0).mean() < 0.9


@pytest.mark.parametrize("purpose", ["RECOVER", "ACCEPT"])
def test_a_shared_random_stream_would_be_seen(purpose, monkeypatch, sampling_state, chi_square_excess):
    streams = {name: Purpose[name] for name in ("ACCEPT", "RECOVER", "BONUS")} | {purpose: Purpose.DRAFT}
    monkeypatch.setattr(rejection, "Purpose", SimpleNamespace(**streams))
    monkeypatch.setattr(random, "draft_position", operator.add)
    counts, target, _ = first_tokens(sampling_state(TRIALS), one_hot=False, draft_ids=SAME)
    assert chi_square_excess(counts, target) > 5


def excess_of_sequences(state, chi_square_excess, *, one_hot, draft_ids):
    """Chi-square of four tokens of a Markov chain over 4 tokens, out of steps with three drafts."""
    vocabulary, length, drafts = 4, 4, 3
    chain = jnp.asarray(np.random.default_rng(0).normal(size=(vocabulary, vocabulary)), jnp.float32)
    draft_ids = jnp.asarray(draft_ids, jnp.int32)
    inverse = jnp.full(vocabulary, -1).at[draft_ids].set(jnp.arange(len(draft_ids)))
    draft_vocab = DraftVocabulary(draft_ids, inverse)
    slot = jnp.arange(TRIALS)

    def step(tokens, count):
        """`tokens` [TRIALS, ...] starts with token 0 as a prompt; `count` are there."""
        positions = (count - 1)[:, None] + jnp.arange(drafts + 1)
        context = [tokens[slot, count - 1]]
        proposed = jnp.zeros((TRIALS, drafts, len(draft_ids)))
        drafted = jnp.zeros((TRIALS, drafts), jnp.int32)
        for column in range(drafts):
            drafted, proposed = gumbel_sample(
                -chain[context[-1]][:, draft_ids],
                state.temperature,
                state.seed,
                random.draft_position(positions[:, 0], column),
                jnp.int32(column),
                drafted,
                proposed,
                purpose=Purpose.DRAFT,
            )
            context.append(draft_ids[drafted[:, column]])
        verdict = verify(
            chain[jnp.stack(context, axis=1)],
            draft_ids[drafted],
            jnp.full(TRIALS, drafts),
            None if one_hot else proposed,
            None if one_hot else draft_vocab,
            state,
            positions,
            mode=SamplingMode.TRUNCATED,
        )
        emitted = jnp.pad(draft_ids[drafted], ((0, 0), (0, 1))).at[slot, verdict.accepted].set(verdict.token)
        return tokens.at[slot[:, None], positions + 1].set(emitted), count + verdict.accepted + 1

    tokens = jnp.zeros((TRIALS, 1 + 2 * length + drafts), jnp.int32)
    count = jnp.ones(TRIALS, jnp.int32)
    step = optimised(step)
    for _ in range(length):
        tokens, count = step(tokens, count)
    generated = np.asarray(tokens[:, 1 : 1 + length])
    cells = generated @ vocabulary ** np.arange(length)[::-1]
    first = jax.tree.map(lambda x: x[:1], state)
    processed = process_logits(chain[None], first, mode=SamplingMode.TRUNCATED)[0]
    chance = np.asarray(jax.nn.softmax(processed), np.float64)
    target = [
        np.prod([chance[a, b] for a, b in itertools.pairwise((0, *sequence))])
        for sequence in itertools.product(range(vocabulary), repeat=length)
    ]
    return chi_square_excess(np.bincount(cells, minlength=vocabulary**length), target)


@pytest.mark.parametrize(
    ("one_hot", "draft_ids", "settings"),
    [
        pytest.param(False, range(4), PLAIN, id="true q"),
        pytest.param(True, range(4), PLAIN, id="one-hot"),
        pytest.param(False, (3, 1), PLAIN, id="true q of a smaller vocabulary"),
        pytest.param(False, range(4), {"temperature": 0.8, "top_k": 3, "min_p": 0.1}, id="true q, truncated"),
    ],
)
def test_joint_distribution_over_several_steps(
    one_hot, draft_ids, settings, sampling_state, chi_square_excess
):
    state = sampling_state(TRIALS, **settings)
    assert excess_of_sequences(state, chi_square_excess, one_hot=one_hot, draft_ids=draft_ids) < 1


def test_drafts_drawn_with_the_noise_of_rejected_ones_would_be_seen(
    monkeypatch, sampling_state, chi_square_excess
):
    """Drafts past the accepted ones have had a say in how many those are."""
    monkeypatch.setattr(random, "draft_position", operator.add)
    excess = excess_of_sequences(sampling_state(TRIALS), chi_square_excess, one_hot=False, draft_ids=range(4))
    assert excess > 3


def heavy_tail(slots, *, one_hot):
    """200,000 tokens, all but token 0 lie 18 nats below it; the one draft, token 77, will be rejected."""
    proposal = jnp.full((slots, 1, 200_000), -30.0).at[..., 77].set(0.0)
    return {
        "logits": jnp.zeros((slots, 2, 200_000)).at[..., 0].set(18.0),
        "drafts": jnp.full((slots, 1), 77),
        "draft_logits": None if one_hot else proposal,
        "draft_vocab": None,
        "positions": jnp.zeros((slots, 2), jnp.int32),
    }


@pytest.mark.parametrize("one_hot", [False, True], ids=["true q", "one-hot"])
def test_the_largest_noise_draws_a_token_18_nats_below(one_hot, monkeypatch, sampling_state):
    """Noise cut off near 16.6, as the usual formula's is in float32, would leave token 0."""
    monkeypatch.setattr(
        gumbel_argmax, "_only_by_name", ("numba",)
    )  # test_argmax.py covers the kernel's noise
    words = jnp.full(200_000, 2**31, jnp.uint32).at[123_456].set(0)
    monkeypatch.setattr(random, "bits", lambda keys, n, _: jnp.broadcast_to(words[:n], (*keys.shape[:-1], n)))
    given = heavy_tail(2, one_hot=one_hot) | {"draft_count": jnp.array([0, 1])}
    check = jax.jit(lambda given, state: verify(**given, sampling=state, mode=SamplingMode.TRUNCATED))
    verdict = check(given, sampling_state(2))
    np.testing.assert_array_equal(verdict.accepted, 0)
    np.testing.assert_array_equal(verdict.token, 123_456)  # the bonus token, and the recovered one


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, True], ids=["true q", "one-hot"])
def test_a_heavy_tail_is_recovered(one_hot, sampling_state):
    trials = 50_000
    given = heavy_tail(1, one_hot=one_hot) | {"draft_count": jnp.array([1])}

    def is_tail(seed):
        state = sampling_state(1, first_seed=seed)
        return verify(**given, sampling=state, mode=SamplingMode.TRUNCATED).token[0] != 0

    tail = jax.jit(lambda: jax.lax.map(is_tail, jnp.arange(trials)).sum())()
    mass = (200_000 - 2) * np.exp(-18.0)
    chance = mass / (1 + mass)
    z = (tail - trials * chance) / np.sqrt(trials * chance * (1 - chance))
    assert abs(z) < 10
