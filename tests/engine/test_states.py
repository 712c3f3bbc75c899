"""Engines over a target with states: what is not read may be NaN, and however work is cut, tokens stay."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversations import assert_as_alone, conversation
from golden_files import golden_folder, golden_outputs
from tiny_engines import SIZES, STATES, compile_all, limit_pages, start_afresh, tokens_of
from tiny_models import write_target

import jaxspec
from jaxspec import ConfigError
from jaxspec.engine.host.scheduler import Choice

MAMBA = "eagle3"
"""The drafter that is tried over the second kind of states; test_pairs.py has it over both."""
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
ANY = {"sampling_modes": ("sampled",)}
"""One program for greedy requests and for sampled ones; others run in programs for greedy requests alone."""


@pytest.fixture
def engines(engines_of, kind):
    return engines_of[kind]


def over(*names):
    """Runs a test over drafters, one of them over the second kind of states and the others over the first."""
    pairs = [("mamba" if name == MAMBA else "recurrent", name) for name in names]
    return pytest.mark.parametrize(("kind", "name"), pairs)


first_kind = pytest.mark.parametrize("kind", ["recurrent"])


def states_of(engine):
    """The places of a layer with states among the target's caches."""
    return [i for i, cache in enumerate(engine.core.state.target_cache) if isinstance(cache, tuple) and cache]


def with_states(state, change):
    """The state with `change` applied to the arrays of every layer that has states, as a list."""
    caches = tuple(
        tuple(change(list(cache))) if isinstance(cache, tuple) and cache else cache
        for cache in state.target_cache
    )
    return replace(state, target_cache=caches)


@over("none", "eagle3", "mtp")
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_nan_in_states_that_nobody_has_changes_nothing(engines, prompts, name, sampling):
    """Those of idle slots, the inputs of old drafts, and copies that are not kept."""
    engine = engines.load(name, **ANY)
    start_afresh(engine)
    ask = {"max_new_tokens": 30, **sampling}
    clean = engine.generate(prompts, **ask)
    for is_cached in (True, False):
        if not is_cached:
            engine.forget_prefixes()
            engine.wait_idle()
        copies = engine.core.scheduler.pages._states.values()
        kept = jnp.asarray([engine.config.batch_size + copy for copy in copies], jnp.int32)

        def poison(arrays, kept=kept):
            *states, pending = arrays
            full = [jnp.full_like(array, jnp.nan).at[kept].set(array[kept]) for array in states]
            return [*full, jnp.full_like(pending, jnp.nan)]

        engine.core.state = with_states(engine.core.state, poison)
        poisoned = engine.generate(prompts, **ask)
        assert any(answer.cached_tokens for answer in poisoned) == is_cached
        assert tokens_of(poisoned) == tokens_of(clean)
        assert [a.stats.accepted_at for a in poisoned] == [a.stats.accepted_at for a in clean]


@over("ngram", "eagle3")
def test_nan_in_the_inputs_of_rejected_drafts_changes_nothing(engines, prompts, name, monkeypatch):
    engine = engines.load(name, batch_size=1, sampling_modes=("greedy",), steps_per_dispatch=1)
    start_afresh(engine)
    clean = engine.generate(prompts, max_new_tokens=30)
    engine.forget_prefixes()
    enqueue = engine.programs.enqueue

    @jax.jit
    def poisoned(state):
        def poison(arrays):
            *states, pending = arrays
            is_rejected = jnp.arange(pending.shape[1])[None] >= state.unapplied[0][:, None]
            return [*states, jnp.where(is_rejected[..., None, None], jnp.nan, pending)]

        return with_states(state, poison)

    def poisoned_enqueue(state, words, *, size):
        state, output = enqueue(state, words, size=size)
        return poisoned(state), output

    monkeypatch.setattr(engine.programs, "enqueue", poisoned_enqueue)
    after = engine.generate(prompts, max_new_tokens=30)
    assert tokens_of(after) == tokens_of(clean)
    assert [a.stats.accepted_at for a in after] == [a.stats.accepted_at for a in clean]


@over("none", "eagle3", "mtp")
def test_after_decoding_a_state_is_what_reading_the_text_would_have_made(engines, prompts, name):
    engine = engines.load(name, batch_size=1, sampling_modes=("greedy",))
    start_afresh(engine)
    accepted = 0
    for prompt in prompts:
        generation = engine.generate(prompt, max_new_tokens=30, ignore_eos=True)
        accepted += generation.stats.accepted
        assert engine.wait_idle(timeout=60)
        # The last step's token and accepted drafts: as far as they are in the state.
        ahead = int(engine.core.state.unapplied[0][0])
        decoded = [np.asarray(engine.core.state.target_cache[i][0][0]) for i in states_of(engine)]
        engine.forget_prefixes()
        text = [*prompt, *generation.token_ids]
        engine.generate(text[: len(text) - 1 - ahead], max_new_tokens=1)
        assert engine.wait_idle(timeout=60)
        for one, i in zip(decoded, states_of(engine), strict=True):
            other = np.asarray(engine.core.state.target_cache[i][0][0])
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())
        engine.forget_prefixes()
    assert accepted > 5 or name == "none"


@over("eagle3", "mtp")
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_company_or_on_how_work_is_cut(engines, prompts, name, sampling):
    ask = {"max_new_tokens": 30, **sampling}
    lone = engines.load(name, batch_size=1, **ANY)
    alone = [lone.generate(prompt, **ask).token_ids for prompt in prompts]
    cut = {"steps_per_dispatch": 4, "prefill_batch_size": 3, "prefill_chunk": 32, "page_size": 4}
    engine = engines.load(name, batch_size=8, mixed_prefill_tokens=16, **cut, **ANY)
    start_afresh(engine)
    for copies in (1, 2):  # the second time from the prefix cache
        params = [ask] * (copies * len(prompts))
        assert tokens_of(engine.generate(prompts * copies, params)) == alone * copies


@over("none", "mtp")
def test_a_state_is_found_in_the_step_that_copies_it(engines, prompts, name):
    sizes = {"prefill_batch_size": 8, "mixed_prefill_tokens": 16, "steps_per_dispatch": 2, "page_size": 4}
    engine = engines.load(name, batch_size=4, sampling_modes=("sampled",), **sizes)
    start_afresh(engine)
    answers = conversation(engine, prompts)
    # The second shows that texts begin alike, and copies the state there for the others.
    assert [answer.cached_tokens for _, answer in answers[:4]] == [0, 0, 16, 16]
    assert_as_alone(engine, answers)


@over("eagle3", "mtp")
@pytest.mark.parametrize("copies", [0, 1, 8])
def test_with_hardly_any_pages_or_copies_tokens_stay(engines, prompts, name, copies, monkeypatch):
    engine = engines.load(name, **ANY)
    start_afresh(engine)
    expected = conversation(engine, prompts, turns=3)
    limit_pages(engine, 12, monkeypatch)
    pages = engine.core.scheduler.pages
    del pages._free_states[: len(pages._free_states) - copies]
    start_afresh(engine)
    before = engine.core.scheduler.num_preempted
    answers = conversation(engine, prompts, turns=3)
    assert [(i, answer.token_ids) for i, answer in answers] == [(i, a.token_ids) for i, a in expected]
    assert engine.core.scheduler.num_preempted > before
    assert any(answer.cached_tokens for _, answer in answers) == bool(copies)


@over("mtp")
def test_tokens_are_those_of_plain_decoding_whatever_k_comes_next(engines, prompts, name, monkeypatch):
    expected = tokens_of(engines.load(**ANY).generate(prompts, max_new_tokens=40))
    engine = engines.load(name, "auto", **ANY)
    compile_all(engine)
    rng, taken = random.Random(0), []

    def choose(decoding):
        taken.append([4, 0, 2, 0, 0, 1, 4][len(taken) % 7])
        return Choice(taken[-1], [r for r in decoding if r.missing_from is not None and rng.random() < 0.2])

    monkeypatch.setattr(engine.core.scheduler, "choose", choose)
    answers = engine.generate(prompts, max_new_tokens=40)
    assert tokens_of(answers) == expected
    assert set(taken) == {0, 1, 2, 4}
    assert sum(answer.stats.accepted for answer in answers)


@first_kind
def test_without_prefix_caching_there_are_no_copies(engines, prompts):
    engine = engines.load(prefix_caching=False, **ANY)
    assert engine.config.state_copies == 0
    expected = tokens_of(engines.load(**ANY).generate(prompts, max_new_tokens=12))
    for _ in range(2):
        answers = engine.generate(prompts, max_new_tokens=12)
        assert tokens_of(answers) == expected
        assert not any(answer.cached_tokens for answer in answers)


@first_kind
def test_a_request_that_fails_leaves_no_state_behind(engines, prompts):
    """Neither behind its own pages nor behind those of another request that it did not use."""
    engine = engines.load("none", batch_size=1)
    start_afresh(engine)
    texts = [[*prompts[2][:20], *([i] * 9)] for i in range(3)]
    clean = engine.generate(texts[2], max_new_tokens=8).token_ids
    engine.forget_prefixes()
    engine.generate(texts[0], max_new_tokens=8)
    assert engine.wait_idle(timeout=60)
    before = set(engine.core.scheduler.pages._states)
    enqueue = engine.programs.enqueue

    def poisoned(state, words, *, size):
        state = with_states(state, lambda arrays: [jnp.full_like(array, jnp.nan) for array in arrays])
        return enqueue(state, words, size=size)

    engine.programs.enqueue = poisoned
    try:
        assert engine.generate(texts[1], max_new_tokens=8).finish_reason == "failed"
    finally:
        engine.programs.enqueue = enqueue
    assert set(engine.core.scheduler.pages._states) == before
    assert engine.generate(texts[2], max_new_tokens=8).token_ids == clean


@pytest.mark.parametrize("case", ["qwen3-5", "nemotron-h"])
def test_answers_equal_those_of_transformers(case):
    """Prompts of three chunks, and 64 tokens, alone and eight at a time. The logits of the other goldens are
    compared in `models`."""
    golden = golden_outputs(case)
    prompts, expected = golden["prompts"].tolist(), golden["answers"].tolist()
    sizes = {"max_model_len": 96, "page_size": 8, "prefill_chunk": 8, "slot_sizes": (1,)}
    drafter = {"kind": "ngram", "num_speculative_tokens": 2}
    folder, ask = golden_folder(case), {"max_new_tokens": 64, "ignore_eos": True}
    with jaxspec.load(
        folder, drafter=drafter, progress=False, batch_size=8, sampling_modes=("greedy",), **sizes
    ) as engine:
        compile_all(engine)
        assert engine.generate(prompts[0], **ask).token_ids == expected[0]
        assert tokens_of(engine.generate(prompts, **ask)) == expected


@pytest.mark.parametrize("kind", STATES)
def test_a_draft_model_without_states_drafts_for_a_target_with_them(engines, engines_of, prompts):
    drafter = {"kind": "draft_model", "source": str(engines_of["full"].folders["target"])}
    drafter |= {"num_speculative_tokens": 3}
    expected = tokens_of(engines.load(**ANY).generate(prompts, max_new_tokens=30))
    with jaxspec.load(
        engines.folders["target"], drafter=drafter, progress=False, sampling_modes=("greedy",), **SIZES
    ) as engine:
        answers = engine.generate(prompts, max_new_tokens=30)
    assert tokens_of(answers) == expected
    assert sum(answer.stats.accepted for answer in answers)


@first_kind
def test_a_draft_model_with_states_is_refused(engines, tmp_path):
    target = write_target(tmp_path / "target", vocab_size=48)
    drafter = {"kind": "draft_model", "source": str(engines.folders["target"])}
    with pytest.raises(ConfigError, match=r"recurrent layers \(qwen3_5_text\) is not supported"):
        jaxspec.load(target, drafter=drafter, progress=False)
