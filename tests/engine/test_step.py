"""One engine step over a target that counts up: what it judges, commits and hands to the drafter."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.drafters.base import Needs, Proposal
from jaxspec.engine.device.plan import Plan, Size, empty_plan, view
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import (
    PHASES,
    Carry,
    chunks_of_prompts,
    decoding_slots,
    engine_step,
    finite_rows,
    judge,
)
from jaxspec.sampling import SamplingMode

VOCABULARY, LONGEST = 12, 32
CONFIG = EngineConfig(page_size=4, prefill_chunk=4).resolve(backend="cpu", model_limit=LONGEST)
GREEDY = SamplingMode.GREEDY
MODELS = SimpleNamespace(
    target=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY)),
    drafter=SimpleNamespace(draft_vocab=None),
)
PLAIN = {"slot": 0, "is_decoding": True, "limit": 9, "steps": 1, "top_p": 1}
CHUNKS = ("index", "start", "count", "is_last", "given_token", "remaining")
UNUSED = (2**31 - 1, 0, 0, False, 0, 0)


def slots(lengths, *, remaining, active=True, stop_tokens=(), num_drafts=0, chunks=()):
    """State and plan of slots of these lengths, whose histories count up from 0, and of some chunks.

    `chunks` are (index, start, count, is last, given token, remaining) of texts that count up. With None for
    `num_drafts`, no slot decodes.
    """
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
        unapplied=(),
        automaton=jnp.zeros(count, jnp.int32),
    )
    size = Size(count, len(chunks), GREEDY, 0 if num_drafts is None else num_drafts + 1)
    words = empty_plan(size, CONFIG)
    into = {name: view(words, name, size, CONFIG) for name in (*PLAIN, *CHUNKS, "tokens", "stop_tokens")}
    for name, value in PLAIN.items():
        into[name][:] = value
    into["slot"][:] = np.arange(count)
    into["stop_tokens"][:, : len(stop_tokens)] = stop_tokens
    for row, chunk in enumerate(chunks):
        fields = dict(zip(CHUNKS, chunk, strict=True))
        for name, value in fields.items():
            into[name][row] = value
        # Past the chunk, as past a prompt: a token that it must not learn from.
        index = np.arange(into["tokens"].shape[1])
        text = (fields["start"] + index) % VOCABULARY
        into["tokens"][row] = np.where(index <= fields["count"], text, 11)
    return state, jax.jit(lambda words: Plan.unpack(words, size, CONFIG))(words)


def judge_of(group):
    """`judge` for rows of logits of this group."""
    return jax.jit(lambda logits: judge(MODELS, CONFIG, group, logits))


def test_a_slot_that_does_not_go_on_is_not_active():
    """Its last request may have been ended by the host, of which the device knows nothing."""
    state, plan = slots([4, 5, 6], remaining=9, active=[True, True, False])
    taken = state.gather(replace(plan, is_decoding=jnp.array([False, True, True])))
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
    state, plan = slots(
        [5] * count, remaining=remaining, active=active, stop_tokens=stops, num_drafts=num_drafts
    )
    logits = np.where(sound[..., None], np.eye(VOCABULARY)[best], np.nan)
    proposal = Proposal(jnp.asarray(drafts, jnp.int32), jnp.asarray(drafted, jnp.int32), None)
    group = decoding_slots(plan, Carry(state, proposal))
    outcome = jax.device_get(judge_of(group)(jnp.asarray(logits, jnp.float32)))
    ways = set()
    for i in range(count):
        tokens, done, failed = expected_block(best[i], sound[i], drafts[i], drafted[i], stops, remaining[i])
        if not active[i]:
            tokens, done, failed = [], False, False
        number = int(outcome.num_tokens[i])
        got = (outcome.tokens[i, :number].tolist(), bool(outcome.done[i]), bool(outcome.failed[i]))
        assert got == (tokens, done, failed)
        ways.add((len(tokens), done, failed))
        if sound[i].all() and tokens:
            assert int(outcome.accepted[i]) >= len(tokens) - 1
    # Every length with an end and without, and every row of NaN.
    assert ways >= {(n, True, False) for n in range(1, 6)} | {(n, True, True) for n in range(5)}
    assert ways >= {(n, False, False) for n in range(6)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_token_is_the_known_one_or_sampled(temperature):
    chunks = [(0, 0, 3, True, -1, 9), (1, 0, 3, True, 6, 9), (2, 0, 3, False, -1, 9), (3, 0, 3, True, 7, 1)]
    state, plan = slots([0, 0, 0, 0], remaining=9, stop_tokens=(6,), num_drafts=None, chunks=chunks)
    sampling = replace(plan.sampling, temperature=jnp.full(4, temperature))
    group = chunks_of_prompts(replace(plan, sampling=sampling), state)
    logits = jnp.full((4, 1, VOCABULARY), -jnp.inf).at[..., 2].set(0.0)
    judged = judge_of(group)
    first = judged(logits)
    assert first.tokens[:, 0].tolist() == [2, 6, 2, 7]
    assert first.num_tokens.tolist() == [1, 1, 0, 1]
    assert first.done.tolist() == [False, True, False, True]  # by the stop token, by the limit
    assert first.failed.tolist() == [False] * 4
    failed = judged(logits.at[:3].set(jnp.nan))
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

    draft_vocab, needs = None, Needs(hidden=True, state_size=1)

    def refresh(self, target, rows, cache):
        self.rows = rows
        return rows.outputs(rows.hidden)[:, :1], cache


@jax.jit
def run(plan, carry):
    """All phases but the first; the state, and what the drafter saw."""
    models = SimpleNamespace(target=CountingTarget(), drafter=RecordingDrafter())
    for phase in PHASES[1:]:
        carry = phase(models, plan, carry)
    return carry.state, models.drafter.rows


def step(state, plan, drafts=None):
    """Runs one with these drafts; returns the state and, as the drafter saw them, blocks of (tokens, next
    tokens, valid)."""
    proposal = Proposal.none(len(state.length))
    if drafts is not None:
        drafts = jnp.asarray(drafts, jnp.int32)
        proposal = Proposal(drafts, jnp.full(len(drafts), drafts.shape[1], jnp.int32), None)
    state, rows = run(plan, Carry(state, proposal))
    seen, start = [], 0
    for block in rows.blocks:
        these = slice(start, start := start + block.positions.size)
        of_block = (rows.tokens[these], rows.next_tokens[these])
        seen.append([*(x.reshape(block.shape).tolist() for x in of_block), block.valid.tolist()])
    return state, seen


def test_a_step_commits_what_it_accepted_and_tells_the_drafter_so():
    active = [True, True, False, True]
    state, plan = slots([4, 5, 6, 7], remaining=[9, 9, 9, 1], active=active, num_drafts=3)
    drafts = [[5, 6, 0], [6, 7, 8], [7, 8, 9], [8, 9, 10]]
    after, ((tokens, next_tokens, valid),) = step(state, plan, drafts)
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
    chunks = [
        (1, 0, 4, False, -1, 5),
        (1, 4, 3, True, -1, 5),
        (2, 0, 2, True, 9, 1),
        (3, 0, 4, False, -1, 5),
        UNUSED,
    ]
    state, plan = slots(
        [4, 0, 0, 0],
        remaining=[9, 0, 0, 0],
        active=[True, False, False, False],
        num_drafts=2 if beside else None,
        chunks=chunks,
    )
    after, seen = step(state, plan, [[5, 6], *[[0, 0]] * 3] if beside else None)
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

    needs = Needs(state_size=1)

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
    chunks = [*[(i, 0, 4, False, -1, 5) for i in range(4)], UNUSED]
    state, plan = slots([0, 0, 0, 0], remaining=[0] * 4, active=False, num_drafts=None, chunks=chunks)
    with pytest.raises(ValueError, match=message):
        engine_step(SimpleNamespace(target=target, drafter=drafter), plan, state)


@pytest.mark.parametrize("vocabulary", [48, 1000, 49_152])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_is_not_finite_wherever_its_poison_is(vocabulary, poison):
    places = np.unique(np.linspace(0, vocabulary - 1, 19).astype(int))
    logits = np.random.default_rng(0).normal(size=(len(places) + 2, vocabulary)).astype(np.float32)
    logits[np.arange(len(places)), places] = poison
    logits[-1] = -np.inf
    assert jax.jit(finite_rows)(logits).tolist() == [False] * len(places) + [True, False]
