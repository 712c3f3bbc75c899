"""K that changes from dispatch to dispatch gives the tokens of a lone run, whatever is chosen for whom."""

import random

import pytest
from tiny_engines import ONLY_OVER, assert_idle, compile_all, limit_pages, tokens_of

from jaxspec import SamplingParams
from jaxspec.engine.host.scheduler import Choice

SEEDED = {"temperature": 1.0, "seed": 11, "max_new_tokens": 40}
NAMES = ("ngram", "eagle3", "near", "dflash", "mtp")
"""One of each way to draft."""
KINDS = [(ONLY_OVER.get(name, ("full",))[0], name) for name in NAMES]


@pytest.fixture(params=KINDS, ids=[name for _, name in KINDS], scope="module")
def engine(engines_of, request):
    kind, name = request.param
    engine = engines_of[kind].load(name, "auto", sampling_modes=("sampled",))
    compile_all(engine)
    return engine


@pytest.fixture
def plain(engines_of, engine):
    (engines,) = (engines for engines in engines_of.values() if engine in engines.loaded.values())
    return engines.load("none")


def force(engine, monkeypatch, ks, seed=0):
    """Has dispatches take these K in turn, and some slots be read again; returns the K that were taken."""
    rng, taken = random.Random(seed), []

    def choose(decoding):
        taken.append(ks[len(taken) % len(ks)])
        return Choice(taken[-1], [r for r in decoding if r.missing_from is not None and rng.random() < 0.2])

    monkeypatch.setattr(engine.core.scheduler, "choose", choose)
    return taken


def test_greedy_tokens_are_those_of_plain_decoding_whatever_k_comes_next(engine, plain, prompts, monkeypatch):
    expected = tokens_of(plain.generate(prompts, max_new_tokens=40))
    taken = force(engine, monkeypatch, [4, 0, 2, 0, 0, 1, 4])
    answers = engine.generate(prompts, max_new_tokens=40)
    assert tokens_of(answers) == expected
    assert set(taken) == {0, 1, 2, 4}
    assert sum(answer.stats.drafted for answer in answers)


def test_a_seed_gives_its_tokens_in_any_company(engine, prompts, monkeypatch):
    force(engine, monkeypatch, [4])
    alone = engine.generate(prompts[1], **SEEDED).token_ids
    engine.forget_prefixes()
    taken = force(engine, monkeypatch, [0, 1, 4, 2])
    ways = [{"max_new_tokens": 40}, SEEDED, {"temperature": 1.0, "max_new_tokens": 40}]
    for _ in range(2):
        params = [SamplingParams(**way) for way in (*ways, *ways)]
        answers = dict(engine.run([engine.make_request(prompts[1], each) for each in params]))
        assert answers[1].token_ids == answers[4].token_ids == alone
    assert set(taken) == {0, 1, 2, 4}


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_a_request_of_fewer_drafts_gets_in_a_program_of_more_what_its_own_gives(
    engine, prompts, monkeypatch, drafts
):
    ask = {**SEEDED, "num_speculative_tokens": drafts}
    answers = []
    for k in (drafts, 4):
        engine.forget_prefixes()
        force(engine, monkeypatch, [k])
        answers.append(engine.generate(prompts[2], **ask))
    own, more = answers
    assert own.token_ids == more.token_ids
    assert own.stats == more.stats
    assert own.stats.drafted <= drafts * own.stats.steps


def test_pages_that_run_out_cost_no_token(tiny_engines, prompts, monkeypatch):
    expected = tokens_of(tiny_engines.load("none").generate(prompts, max_new_tokens=40))
    engine = tiny_engines.load("near", "auto", sampling_modes=("sampled",))
    compile_all(engine)
    limit_pages(engine, 12, monkeypatch)
    for seed in range(5):
        force(engine, monkeypatch, [0, 4, 0, 1], seed)
        before = engine.core.scheduler.num_preempted
        assert tokens_of(engine.generate(prompts, max_new_tokens=40)) == expected
        assert engine.core.scheduler.num_preempted > before


def test_plain_decoding_leaves_the_drafter_as_it_was(tiny_engines, prompts, monkeypatch):
    engine = tiny_engines.load("eagle3", "auto", sampling_modes=("sampled",))
    compile_all(engine)
    force(engine, monkeypatch, [0])
    caches = []
    enqueue = engine.programs.enqueue

    def watching(state, *args, size):
        before = [layer.copy() for layer in state.draft_cache]
        state, output = enqueue(state, *args, size=size)
        if size.width:
            assert size.drafts == 0
            caches.append(all((old == new).all() for old, new in zip(before, state.draft_cache, strict=True)))
        return state, output

    monkeypatch.setattr(engine.programs, "enqueue", watching)
    answer = engine.generate(prompts[1], max_new_tokens=20)
    # Of eight steps each.
    assert len(caches) >= 3
    assert all(caches)
    assert answer.stats.drafted == 0


def test_a_request_may_decode_plainly_or_with_fewer_drafts(tiny_engines, prompts):
    engine = tiny_engines.load("eagle3", 3)
    expected = engine.generate(prompts[1], max_new_tokens=20).token_ids
    for ask, most in (
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 2}, 2),
    ):
        answer = engine.generate(prompts[1], max_new_tokens=20, **ask)
        assert answer.token_ids == expected
        assert answer.stats.drafted == most * answer.stats.draft_steps
        assert bool(answer.stats.drafted) == bool(most)
    with pytest.raises(ValueError, match="num_speculative_tokens: this engine drafts at most 3, got 4"):
        engine.generate(prompts[1], num_speculative_tokens=4)


def test_what_speculation_left_behind_is_read_again_from_there_alone(tiny_engines, prompts, monkeypatch):
    engine = tiny_engines.load(
        "self", "auto", sampling_modes=("sampled",)
    )  # every draft is accepted where the drafter has its rows
    compile_all(engine)

    def choose(decoding):
        (running,) = decoding
        answered = len(running.request.token_ids)
        again = running.missing_from is not None and answered > 30
        return Choice(0 if answered < 30 or again else 4, [running] if again else [])

    monkeypatch.setattr(engine.core.scheduler, "choose", choose)
    engine.forget_prefixes()
    before = engine.counters
    answer = engine.generate(prompts[2], max_new_tokens=60)
    read = engine.counters.since(before)
    assert answer.stats.accepted == answer.stats.drafted > 0
    # The prompt, and the rows since it, but for those of pages that were whole; and two dispatches in flight
    # of eight steps each.
    assert read.prompt_rows_used < 30 + 30 + 16 + 2 * 8
    assert read.cached_rows >= 24
    assert_idle(engine)
