"""A request's tokens do not depend on its company, nor on how the engine cuts its work."""

import pytest
from tiny_engines import tokens_of

from jaxspec import SamplingParams

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
MODES = {"eagle3": ("greedy", "sampled"), "near": ("sampled",)}
"""Drafters and their engines' modes: programs for sampled requests answer greedily, too."""


@pytest.fixture(params=MODES, scope="module")
def name(request):
    return request.param


@pytest.fixture(params=["greedy", "sampled"])
def sampling(request):
    return {} if request.param == "greedy" else SAMPLED


@pytest.fixture
def alone(tiny_engines, prompts, name, sampling):
    """Every prompt on its own, in a batch of one."""
    engine = tiny_engines.load(name, batch_size=1, sampling_modes=MODES[name])
    return [engine.generate(prompt, max_new_tokens=30, **sampling).token_ids for prompt in prompts]


def test_in_a_batch_of_seven_and_padded_to_eight(tiny_engines, prompts, name, sampling, alone):
    for batch_size in (7, 8):
        engine = tiny_engines.load(name, batch_size=batch_size, sampling_modes=MODES[name])
        assert tokens_of(engine.generate(prompts, max_new_tokens=30, **sampling)) == alone


def test_with_several_steps_a_dispatch_and_other_prefill_shapes(tiny_engines, prompts, name, sampling, alone):
    sizes = {"steps_per_dispatch": 4, "prefill_batch_size": 3, "prefill_chunk": 32, "page_size": 4}
    engine = tiny_engines.load(name, sampling_modes=MODES[name], **sizes)
    assert tokens_of(engine.generate(prompts, max_new_tokens=30, **sampling)) == alone


def test_refilled_from_a_queue_longer_than_the_batch(tiny_engines, prompts, name, sampling, alone):
    engine = tiny_engines.load(name, batch_size=1, sampling_modes=MODES[name])
    params = [{"max_new_tokens": 30, **sampling}] * len(prompts) * 2
    assert tokens_of(engine.generate(prompts * 2, params)) == alone * 2


def test_in_company_that_samples_otherwise(tiny_engines, prompts):
    """Greedy, truncated and plain sampling side by side: one slot's parameters never touch another's."""
    ways = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.3, "seed": 1},
        {"temperature": 2.0, "top_k": 4, "seed": 1},
        {"temperature": 1.5, "min_p": 0.3, "seed": 9},
        {"temperature": 1.0, "top_p": 0.5, "seed": 9},
        {"temperature": 0.0, "seed": 5},
    ]
    params = [SamplingParams(max_new_tokens=30, **way) for way in ways]
    engine = tiny_engines.load("eagle3", batch_size=7)
    together = dict(engine.run([engine.make_request(prompts[1], way) for way in params]))
    alone = tiny_engines.load("eagle3", batch_size=1)
    answers = [alone.generate(prompts[1], way).token_ids for way in params]
    assert [together[i].token_ids for i in range(len(ways))] == answers
    assert answers[0] == answers[-1]
    assert len({tuple(answer) for answer in answers}) == len(ways) - 1


def test_seeds_belong_to_requests(tiny_engines, prompts):
    engine = tiny_engines.load("eagle3", batch_size=7)
    prompt = prompts[0]
    first, again = (engine.generate(prompt, max_new_tokens=20, temperature=1.0, seed=3) for _ in range(2))
    other = engine.generate(prompt, max_new_tokens=20, temperature=1.0, seed=4)
    unseeded = {
        tuple(engine.generate(prompt, max_new_tokens=20, temperature=1.0).token_ids) for _ in range(3)
    }
    assert first.token_ids == again.token_ids != other.token_ids
    assert len(unseeded) == 3
