"""Every option of `check_lossless` reaches the answers that it compares."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from options import assert_complete, parameters

from jaxspec import AcceptanceStats, DrafterConfig, Generation, SamplingParams, check_lossless
from jaxspec.lab import lossless

DRAFTER = {"kind": "ngram", "num_speculative_tokens": 2}
OPTIONS = {"drafter", "target", "prompts", "max_new_tokens", "samples", "temperature", "seed", "significance"}
OPTIONS |= {"bitwise"}


class Asked:
    """An engine that records what it is asked; its second tokens depend a little on its drafter."""

    def __init__(self, target, drafter, settings):
        self.target, self.drafter, self.settings = target, drafter, settings
        self.greedy, self.sampled = [], []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def generate(self, prompts, **options):
        self.greedy.append((prompts, SamplingParams(**options)))
        return [self.answer(7) for _ in prompts]

    def answer(self, second):
        stats = AcceptanceStats()
        stats.add_step(2, 1)
        return Generation("", [5, second, 6], "length", [1], stats)

    def make_request(self, prompt, params):
        self.sampled.append((prompt, params))
        return SimpleNamespace(prompt=prompt, max_new_tokens=params.max_new_tokens)

    def run(self, requests):
        for i, _ in enumerate(requests):
            yield i, self.answer(int(i % 4 == 0 and self.drafter != {"kind": "none"}))


@pytest.fixture
def engines(monkeypatch):
    loaded = []

    def load(target, *, drafter, **settings):
        loaded.append(Asked(target, drafter, settings))
        return loaded[-1]

    monkeypatch.setattr(lossless, "load", load)
    return loaded


def test_every_option_reaches_the_answers(engines):
    assert_complete("check_lossless", parameters(check_lossless), OPTIONS)
    first = 2**64 - 3
    options = {"prompts": [[1], [2]], "max_new_tokens": 9, "samples": 40, "temperature": 0.3, "seed": first}
    check_lossless(DRAFTER, "a target", **options, page_size=4, dtype="bfloat16")
    plain, other = engines
    for engine, drafter, start in ((plain, {"kind": "none"}, first), (other, DRAFTER, first + 40)):
        assert (engine.target, engine.drafter) == ("a target", drafter)
        assert engine.settings == {"dtype": "bfloat16", "progress": False, "page_size": 4}
        assert engine.greedy == [([[1], [2]], SamplingParams(max_new_tokens=9))]
        params = SamplingParams(max_new_tokens=3, temperature=0.3, ignore_eos=True)
        seeds = [(start + i) % 2**64 for i in range(40)]
        assert engine.sampled == [(prompt, replace(params, seed=s)) for prompt in ([1], [2]) for s in seeds]


def test_the_drafter_may_be_a_configuration_and_no_samples_may_be_wanted(engines):
    check_lossless(DrafterConfig(**DRAFTER), "a target", prompts=[1], samples=0)
    assert engines[1].drafter == DrafterConfig(**DRAFTER)
    assert not engines[0].sampled
    assert engines[0].settings["dtype"] == "float32"


def test_the_level_is_the_one_that_is_asked_for(engines):
    options = {"prompts": [1], "samples": 40}
    p_value = check_lossless(DRAFTER, "a target", **options).p_value
    assert 1e-3 < p_value < 0.1
    below = check_lossless(DRAFTER, "a target", **options, significance=p_value / 2)
    above = check_lossless(DRAFTER, "a target", **options, significance=p_value * 2)
    assert (below.outcome, above.outcome) == ("cannot tell", "different")  # so few samples show little


def test_bits_are_compared_by_exact_engines_if_that_is_asked_for(engines, monkeypatch):
    searched = []
    monkeypatch.setattr(lossless, "first_difference_in_bits", lambda *asked: searched.append(asked))
    check_lossless(DRAFTER, "a target", prompts=[[1], [2]], samples=0)
    assert not searched
    check_lossless(DRAFTER, "a target", prompts=[[1], [2]], samples=0, bitwise=True)
    plain, other = engines[2:]
    assert plain.settings == other.settings == {"exact": True, "progress": False}
    assert searched == [(plain, [1, 5, 7, 6])]
