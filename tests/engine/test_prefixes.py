"""Prompts that begin like what the engine has read or answered before: read from there on, same tokens."""

import numpy as np
import pytest
from tiny_engines import DRAFTERS, PAIRS, start_afresh, tokens_of

from jaxspec import ConfigError, EngineConfig, SamplingParams

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
BOTH = pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
PLAIN = [("full", "none"), ("sliding", "none"), ("indexed window", "none"), ("latent", "none")]


def conversation(engine, prompts, **sampling):
    """Three turns of several requests that share a head; every answer is read again with the next turn."""
    texts, answers = [prompts[2][:20] + prompt[:9] for prompt in prompts[:4]], []
    for turn in range(3):
        generations = engine.generate(texts, max_new_tokens=9, ignore_eos=True, **sampling)
        answers.append(generations)
        texts = [
            [*generation.prompt_token_ids, *generation.token_ids, turn, 7] for generation in generations
        ]
    return answers


@BOTH
@pytest.mark.parametrize(("kind", "name"), [*PLAIN, *PAIRS])
def test_a_cached_prefix_changes_no_token(engines_of, prompts, kind, name, sampling):
    """Nor a drafter's state: what it drafts from cached pages is accepted as before."""
    engine = engines_of[kind].load(name, DRAFTERS.get(name, 3))
    start_afresh(engine)
    cached = conversation(engine, prompts, **sampling)
    assert all(generation.cached_tokens >= 24 for turn in cached[1:] for generation in turn)
    for turn in cached:
        for generation in turn:
            engine.forget_prefixes()
            alone = engine.generate(
                generation.prompt_token_ids, max_new_tokens=9, ignore_eos=True, **sampling
            )
            assert alone.cached_tokens == 0
            assert alone.token_ids == generation.token_ids
            assert alone.stats.accepted_at == generation.stats.accepted_at


@BOTH
@pytest.mark.parametrize("name", ["none", "ngram", "eagle3", "near", "dflash"])
def test_a_prompt_is_found_whatever_the_shape_of_the_programs(tiny_engines, prompts, name, sampling):
    """Pieces of several prompts in one step, of which later ones see pages that the same step writes."""
    sizes = {"prefill_rows": 4, "rows_beside": 16, "steps_per_dispatch": 2, "page_size": 4}
    engine = tiny_engines.load(name, batch_size=4, sampling_modes=("sampled",), **sizes)
    engine.programs.wait_compiled()
    start_afresh(engine)
    cached = conversation(engine, prompts, **sampling)
    assert [generation.cached_tokens for generation in cached[0]] == [0, 20, 20, 20]
    for turn in cached:
        for generation in turn:
            engine.forget_prefixes()
            alone = engine.generate(
                generation.prompt_token_ids, max_new_tokens=9, ignore_eos=True, **sampling
            )
            assert alone.token_ids == generation.token_ids


@BOTH
@pytest.mark.parametrize("name", ["ngram", "eagle3", "near"])
def test_with_hardly_any_pages_what_is_kept_goes_and_tokens_stay(tiny_engines, prompts, name, sampling):
    """Requests put one another back, and what they had is given away, all the time."""
    roomy = tiny_engines.load(name)
    start_afresh(roomy)
    expected = conversation(roomy, prompts, **sampling)
    engine = tiny_engines.load(name, num_pages=12)
    start_afresh(engine)
    before = engine.core.scheduler.num_preempted
    for turn, again in zip(expected, conversation(engine, prompts, **sampling), strict=True):
        assert tokens_of(again) == tokens_of(turn)
    assert engine.core.scheduler.num_preempted > before


def test_samples_of_one_prompt_read_it_once(tiny_engines):
    engine = tiny_engines.load("eagle3", batch_size=8)
    start_afresh(engine)
    before = engine.counters
    head = (np.arange(40) * 5 % 48).tolist()
    params = [SamplingParams(max_new_tokens=5, temperature=1.0, seed=seed) for seed in range(8)]
    answers = dict(engine.run([engine.make_request([*head, 1, 2], way) for way in params]))
    work = engine.counters.since(before)
    assert sorted(answers[i].cached_tokens for i in range(8)) == [0] + [40] * 7
    assert (work.prompt_rows_used, work.cached_rows) == (42 + 7 * 2, 7 * 40)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1


def test_a_prompt_that_ends_with_a_page_reads_that_page_again(tiny_engines):
    """The page before is found: the token after it is the prompt's own."""
    engine = tiny_engines.load("near")
    start_afresh(engine)
    prompt = (np.arange(24) * 7 % 48).tolist()
    first, again = (engine.generate(prompt, max_new_tokens=12) for _ in range(2))
    assert again.token_ids == first.token_ids
    assert (first.cached_tokens, again.cached_tokens) == (0, 16)
    longer = engine.generate([*prompt, *first.token_ids[:1]], max_new_tokens=11)
    assert (longer.cached_tokens, longer.token_ids) == (24, first.token_ids[1:])


def test_without_prefix_caching_nothing_is_found(tiny_engines, prompts):
    engine = tiny_engines.load("ngram", prefix_caching=False)
    for _ in range(2):
        assert engine.generate(prompts[2], max_new_tokens=12).cached_tokens == 0
    assert not engine.core.scheduler.pages._kept


def test_prefix_caching_is_true_or_false():
    with pytest.raises(ConfigError, match="engine.prefix_caching must be true or false, not 'off'"):
        EngineConfig(prefix_caching="off")
