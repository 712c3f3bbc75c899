"""One engine step over a target that counts up: what it judges, commits and hands to the drafter."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import PageTable
from jaxspec.config import EngineConfig
from jaxspec.drafters.base import Proposal
from jaxspec.engine.device.state import MAX_STOP_TOKENS, Batch, Chunks, EngineState
from jaxspec.engine.device.step import accept, finite_rows, sample_first, verify_and_commit
from jaxspec.sampling import SamplingMode, SamplingState

VOCABULARY, LONGEST = 12, 32
CONFIG = EngineConfig(page_size=4).resolve(backend="cpu", model_limit=LONGEST)
GREEDY = SamplingMode.GREEDY


def slots(lengths, *, remaining, active=True, stop_tokens=()):
    """State and arguments of slots of these lengths, whose histories count up from 0."""
    count = len(lengths)
    history = np.tile(np.arange(LONGEST + 1), (count, 1)) % VOCABULARY
    state = EngineState(
        target_cache=(),
        draft_cache=(),
        history=jnp.asarray(np.where(np.arange(LONGEST + 1) <= np.asarray(lengths)[:, None], history, -7)),
        length=jnp.asarray(lengths, jnp.int32),
        hidden=jnp.full((count, 1), -7.0),
        remaining=jnp.broadcast_to(jnp.asarray(remaining, jnp.int32), (count,)),
        active=jnp.broadcast_to(jnp.asarray(active), (count,)),
    )
    stops = np.full((count, MAX_STOP_TOKENS), -1, np.int32)
    stops[:, : len(stop_tokens)] = stop_tokens
    zeros = jnp.zeros(count)
    batch = Batch(
        slot=jnp.arange(count, dtype=jnp.int32),
        is_decoding=jnp.ones(count, bool),
        limit=jnp.full(count, 9, jnp.int32),
        steps=jnp.ones(count, jnp.int32),
        page_table=PageTable(jnp.zeros((count, 9), jnp.int32), 4),
        stop_tokens=jnp.asarray(stops),
        sampling=SamplingState(
            zeros, zeros.astype(jnp.int32), zeros + 1, zeros, jnp.zeros((count, 2), jnp.uint32)
        ),
    )
    return state, batch


def test_a_slot_that_does_not_go_on_is_not_active():
    """Its last request may have been ended by the host, of which the device knows nothing."""
    state, batch = slots([4, 5, 6], remaining=9, active=[True, True, False])
    taken = state.gather(replace(batch, is_decoding=jnp.array([False, True, True])))
    assert taken.active.tolist() == [False, True, False]


def expected_block(best, sound, drafts, drafted, stops, remaining):
    """(tokens, done, failed) of one slot, token by token: row i has token best[i] if sound[i], else NaN."""
    tokens = []
    for i in range(len(best)):
        if not sound[i]:
            return tokens, True, True
        accepted = i < drafted and drafts[i] == best[i]
        tokens.append(drafts[i] if accepted else best[i])
        if tokens[-1] in stops or len(tokens) == remaining:
            return tokens, True, False
        if not accepted:
            return tokens, False, False
    raise AssertionError


def test_blocks_are_accepted_and_end_as_token_by_token():
    """Stop tokens, limits and rows of NaN, at every place of a block, rejected ones included."""
    rng = np.random.default_rng(0)
    count, num_drafts, stops = 600, 4, (3, 9)
    best = rng.integers(VOCABULARY, size=(count, num_drafts + 1))
    drafts = np.where(rng.random((count, num_drafts)) < 0.85, best[:, :-1], 0)
    drafted = rng.integers(num_drafts + 1, size=count)
    remaining = rng.integers(1, 8, size=count)
    sound = rng.random((count, num_drafts + 1)) < 0.9
    active = rng.random(count) < 0.9
    state, batch = slots([5] * count, remaining=remaining, active=active, stop_tokens=stops)
    logits = np.where(sound[..., None], np.eye(VOCABULARY)[best], np.nan)
    emitted, accepted = accept(
        jnp.asarray(logits, jnp.float32),
        state,
        batch,
        Proposal(jnp.asarray(drafts, jnp.int32), jnp.asarray(drafted, jnp.int32), None),
        SimpleNamespace(draft_vocab=None),
        config=CONFIG,
        mode=GREEDY,
        vocab_size=VOCABULARY,
    )
    ways = set()
    for i in range(count):
        tokens, done, failed = expected_block(best[i], sound[i], drafts[i], drafted[i], stops, remaining[i])
        if not active[i]:
            tokens, done, failed = [], False, False
        number = int(emitted.num_tokens[i])
        got = (emitted.tokens[i, :number].tolist(), bool(emitted.done[i]), bool(emitted.failed[i]))
        assert got == (tokens, done, failed)
        ways.add((len(tokens), done, failed))
        if sound[i].all() and tokens:
            assert int(emitted.accepted[i]) == int(accepted[i]) >= len(tokens) - 1
    # Every length with an end and without, and every row of NaN.
    assert ways >= {(n, True, False) for n in range(1, 6)} | {(n, True, True) for n in range(5)}
    assert ways >= {(n, False, False) for n in range(6)}


def chunks_of(*chunks, width=4):
    """Chunks (batch index, start, count, is last, known, remaining) of texts that count up."""
    batch_index, start, count, is_last, known, remaining = map(np.array, zip(*chunks, strict=True))
    tokens = start[:, None] + np.arange(width + 1)
    # Past the chunk, as past a prompt: a token that it must not learn from.
    tokens = np.where(np.arange(width + 1) <= count[:, None], tokens % VOCABULARY, 11)
    ints = (jnp.asarray(x, jnp.int32) for x in (batch_index, tokens[:, :-1], tokens[:, 1:], start, count))
    return Chunks(*ints, jnp.asarray(is_last), *(jnp.asarray(x, jnp.int32) for x in (known, remaining)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_token_is_the_known_one_or_sampled(temperature):
    _, batch = slots([0, 0, 0, 0], remaining=9, stop_tokens=(6,))
    sampling = replace(batch.sampling, temperature=jnp.full(4, temperature))
    chunks = chunks_of(
        (0, 0, 3, True, -1, 9), (1, 0, 3, True, 6, 9), (2, 0, 3, False, -1, 9), (3, 0, 3, True, 7, 1)
    )
    logits = jnp.full((4, VOCABULARY), -jnp.inf).at[:, 2].set(0.0)
    first = sample_first(logits, replace(batch, sampling=sampling), chunks)
    assert first.token.tolist() == [2, 6, 2, 7]
    assert first.done.tolist() == [False, True, False, True]  # by the stop token, by the limit
    assert first.failed.tolist() == [False] * 4
    failed = sample_first(logits.at[:3].set(jnp.nan), replace(batch, sampling=sampling), chunks)
    assert failed.failed.tolist() == [True, True, False, False]
    assert failed.done.tolist() == [True, True, False, True]


class CountingTarget:
    config = SimpleNamespace(vocab_size=VOCABULARY)
    """Its hidden state is the position of the row, and the token after t is t + 1."""

    kinds = ()

    def __call__(self, tokens, positions, memory, *, capture):
        return jnp.stack([positions, tokens], axis=1).astype(jnp.float32), (), SimpleNamespace(caches=())

    def logits(self, hidden):
        return jax.nn.one_hot((hidden[:, 1].astype(jnp.int32) + 1) % VOCABULARY, VOCABULARY)


class RecordingDrafter:
    """Drafts from the position of the row."""

    capture, draft_vocab, reads_hidden, hidden_size = (), None, True, 1

    def refresh(self, target, rows, cache):
        self.rows = rows
        return rows.outputs(rows.hidden)[:, :1], cache


@jax.jit
def verify(state, batch, proposal, chunks):
    """The state, and what the drafter saw."""
    drafter = RecordingDrafter()
    state, _ = verify_and_commit(
        SimpleNamespace(target=CountingTarget(), drafter=drafter),
        state,
        batch,
        proposal,
        chunks,
        config=CONFIG,
        mode=None if proposal is None else GREEDY,
    )
    return state, drafter.rows


def step(state, batch, drafts, chunks):
    """Runs one; returns the state and, as the drafter saw them, blocks of (tokens, next tokens, valid)."""
    proposal = None
    if drafts is not None:
        drafts = jnp.asarray(drafts, jnp.int32)
        proposal = Proposal(drafts, jnp.full(len(drafts), drafts.shape[1], jnp.int32), None)
    state, rows = verify(state, batch, proposal, chunks)
    seen, start = [], 0
    for block in rows.blocks:
        these = slice(start, start := start + block.positions.size)
        of_block = (rows.tokens[these], rows.next_tokens[these])
        seen.append([*(x.reshape(block.shape).tolist() for x in of_block), block.valid.tolist()])
    return state, seen


def test_a_step_commits_what_it_accepted_and_tells_the_drafter_so():
    state, batch = slots([4, 5, 6, 7], remaining=[9, 9, 9, 1], active=[True, True, False, True])
    drafts = [[5, 6, 0], [6, 7, 8], [7, 8, 9], [8, 9, 10]]
    after, ((tokens, next_tokens, valid),) = step(state, batch, drafts, None)
    assert tokens == [[4, 5, 6, 0], [5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 10]]
    assert valid == [[True] * 3 + [False], [True] * 4, [False] * 4, [True] * 4]
    assert [row[:3] for row in next_tokens[:2]] == [[5, 6, 7], [6, 7, 8]]
    assert next_tokens[1][3] == 9
    assert after.length.tolist() == [7, 9, 6, 8]
    assert after.remaining.tolist() == [6, 5, 9, 0]
    assert after.active.tolist() == [True, True, False, False]
    for history, length in zip(after.history.tolist(), after.length.tolist(), strict=True):
        assert history == [i % VOCABULARY for i in range(length + 1)] + [-7] * (LONGEST - length)
    # Of the last row that stands; a slot that did not run keeps its own.
    assert after.hidden[:3, 0].tolist() == [6, 8, -7]


@pytest.mark.parametrize("beside", [False, True])
def test_pieces_are_read_into_their_slots(beside):
    """Two chunks of one prompt, the only one of another, half of a third, and an unused one."""
    state, batch = slots([4, 0, 0, 0], remaining=[9, 0, 0, 0], active=[True, False, False, False])
    chunks = chunks_of(
        (1, 0, 4, False, -1, 5),
        (1, 4, 3, True, -1, 5),
        (2, 0, 2, True, 9, 1),
        (3, 0, 4, False, -1, 5),
        (2**31 - 1, 0, 0, False, 0, 0),
    )
    after, seen = step(state, batch, [[5, 6], *[[0, 0]] * 3] if beside else None, chunks)
    tokens, next_tokens, valid = seen[-1]
    assert tokens[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next_tokens[0] == [1, 2, 3, 4]
    assert next_tokens[1][:3] == [5, 6, 7]
    assert next_tokens[2][:2] == [1, 9]
    assert [sum(row) for row in valid] == [4, 3, 2, 4, 0]
    assert after.length.tolist() == [7 if beside else 4, 7, 2, 0]
    assert after.active.tolist() == [True, True, False, False]
    assert after.remaining.tolist()[1:] == [4, 0, 0]
    assert after.hidden[:, 0].tolist() == [6 if beside else -7, 6, 1, -7]
    assert after.history[1, :9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -7]
    assert after.history[2, :4].tolist() == [0, 1, 9, -7]
    assert after.history[3, :5].tolist() == [0, 1, 2, 3, -7]
    assert after.history[0, :9].tolist() == [0, 1, 2, 3, 4, *([5, 6, 7, -7] if beside else [-7] * 4)]


class Hasty(RecordingDrafter):
    """Returns a state for every row."""

    reads_hidden = False

    def refresh(self, target, rows, cache):
        return jnp.zeros((len(rows.tokens), 1)), cache


class Narrow(CountingTarget):
    """Returns only rows whose output is needed."""

    def __call__(self, tokens, positions, memory, *, capture):
        hidden, captured, after = super().__call__(tokens, positions, memory, capture=capture)
        return memory.outputs(-1, hidden), captured, after


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (CountingTarget(), Hasty(), "CountingTarget returned 20 rows instead of 5"),
        (Narrow(), Hasty(), "Hasty.refresh returned 20 rows instead of 5"),
    ],
    ids=["target", "drafter"],
)
def test_a_network_that_returns_rows_that_nobody_needs_is_named(target, drafter, message):
    state, batch = slots([0, 0, 0, 0], remaining=[0] * 4, active=False)
    chunks = chunks_of(*[(i, 0, 4, False, -1, 5) for i in range(4)], (2**31 - 1, 0, 0, False, 0, 0))
    models = SimpleNamespace(target=target, drafter=drafter)
    with pytest.raises(ValueError, match=message):
        verify_and_commit(models, state, batch, None, chunks, config=CONFIG, mode=None)


@pytest.mark.parametrize("vocabulary", [48, 1000, 49_152])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_is_not_finite_wherever_its_poison_is(vocabulary, poison):
    places = np.unique(np.linspace(0, vocabulary - 1, 19).astype(int))
    logits = np.random.default_rng(0).normal(size=(len(places) + 2, vocabulary)).astype(np.float32)
    logits[np.arange(len(places)), places] = poison
    logits[-1] = -np.inf
    assert jax.jit(finite_rows)(logits).tolist() == [False] * len(places) + [True, False]
