"""Prompts that begin like what the engine has read or answered before: read from there on, same tokens."""

import numpy as np
import pytest
from conversations import assert_as_alone, conversation
from tiny_engines import limit_pages, start_afresh

from jaxspec import ConfigError, EngineConfig, SamplingParams


@pytest.mark.parametrize("name", ["none", "ngram", "eagle3", "near", "dflash"])
def test_a_prefix_is_found_in_the_step_that_reads_it(tiny_engines, prompts, name):
    """Chunks of several prompts side by side, of which later ones see pages that the same step writes."""
    sizes = {"prefill_batch_size": 8, "mixed_prefill_tokens": 16, "steps_per_dispatch": 2, "page_size": 4}
    engine = tiny_engines.load(name, batch_size=4, sampling_modes=("sampled",), **sizes)
    start_afresh(engine)
    before = engine.counters
    answers = conversation(engine, prompts)
    assert [answer.cached_tokens for _, answer in answers[:4]] == [0, 16, 16, 16]
    assert engine.counters.since(before).prompt_passes < 6
    assert_as_alone(engine, answers)


@pytest.mark.parametrize("name", ["ngram", "eagle3", "near"])
def test_with_hardly_any_pages_what_is_kept_goes_and_tokens_stay(tiny_engines, prompts, name, monkeypatch):
    """Requests put one another back, and what they had is given away, all the time."""
    engine = tiny_engines.load(name)
    start_afresh(engine)
    expected = conversation(engine, prompts, turns=3)
    limit_pages(engine, 12, monkeypatch)
    start_afresh(engine)
    before = engine.core.scheduler.num_preempted
    answers = conversation(engine, prompts, turns=3)
    assert [(i, answer.token_ids) for i, answer in answers] == [(i, a.token_ids) for i, a in expected]
    assert engine.core.scheduler.num_preempted > before


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("ngram", True),
        ("eagle3", False),
        ("near", False),
        ("dflash", False),
        ("peagle", False),
        ("none", False),
    ],
)
def test_the_history_of_a_cached_prefix_is_put_only_for_a_drafter_that_reads_it(
    tiny_engines, prompts, name, reads, monkeypatch
):
    """It takes the host milliseconds, in which a GPU waits."""
    engine = tiny_engines.load(name)
    start_afresh(engine)
    put, calls = engine.programs.put_history, []
    monkeypatch.setattr(engine.programs, "put_history", lambda *args: calls.append(1) or put(*args))
    answers = conversation(engine, prompts)
    assert sum(answer.cached_tokens > 0 for _, answer in answers) > 4
    assert (len(calls) >= 4) is reads
    assert reads or not calls


def test_samples_of_one_prompt_read_it_once(tiny_engines):
    engine = tiny_engines.load("eagle3", batch_size=8)
    start_afresh(engine)
    before = engine.counters
    head = (np.arange(40) * 5 % 48).tolist()
    samples = [SamplingParams(max_new_tokens=5, temperature=1.0, seed=seed) for seed in range(8)]
    answers = dict(engine.run([engine.make_request([*head, 1, 2], sample) for sample in samples]))
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
    with pytest.raises(ConfigError, match="must be true or false, not 'off'"):
        EngineConfig(prefix_caching="off")
