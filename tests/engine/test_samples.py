"""Several samples of a prompt: their seeds, the prompt that is read once, the best of them."""

import pytest
from tiny_engines import tokens_of

SAMPLED = {"temperature": 1.0, "seed": 9, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture
def engine(tiny_engines):
    return tiny_engines.load("ngram")


def test_each_prompt_has_a_list_of_samples(engine, prompts):
    """The first is the answer to the prompt alone, wherever it stands in a list."""
    alone = [engine.generate(prompt, **SAMPLED).token_ids for prompt in prompts[:3]]
    six = engine.generate(prompts[1], n=6, **SAMPLED)
    assert len(set(map(tuple, tokens_of(six)))) == 6
    assert six[0].token_ids == alone[1]
    both = engine.generate(prompts[:3], n=6, **SAMPLED)
    assert [samples[0].token_ids for samples in both] == alone
    assert tokens_of(both[1]) == tokens_of(six)
    assert tokens_of(engine.generate([prompts[1]] * 6, **SAMPLED)) == tokens_of(six)
    (one,) = engine.generate(prompts[1], n=1, **SAMPLED)
    assert one.token_ids == alone[1]
    again = engine.generate(prompts[1], **SAMPLED | {"seed": six[4].seed})
    assert again.token_ids == six[4].token_ids


def test_lists_of_parameters_and_of_seeds_are_taken_as_they_are(engine, prompts):
    prompt = prompts[1]
    rest = {name: value for name, value in SAMPLED.items() if name != "seed"}
    alone = {seed: engine.generate(prompt, **rest, seed=seed).token_ids for seed in (1, 2)}
    seeds = [1, 2, 1]
    assert tokens_of(engine.generate([prompt] * 3, **rest, seed=seeds)) == [alone[seed] for seed in seeds]
    params = [{**rest, "seed": seed} for seed in seeds]
    assert tokens_of(engine.generate([prompt] * 3, params)) == [alone[seed] for seed in seeds]
    twice = engine.generate([prompt, prompt], params[:2], n=2)
    assert [samples[0].token_ids for samples in twice] == [alone[1], alone[2]]
    assert engine.generate(prompt, n=2, **rest, seed=1)[1].token_ids == twice[0][1].token_ids


def test_a_prompt_is_read_once(engine):
    """Five pages and a bit: the samples share the pages, and each reads the bit."""
    prompt = [(7 * i) % 48 for i in range(43)]
    engine.forget_prefixes()
    assert engine.wait_idle(60)
    before = engine.counters.prompt_rows_used
    answers = engine.generate(prompt, n=6, **SAMPLED)
    assert [answer.cached_tokens for answer in answers] == [0] + [40] * 5
    assert engine.counters.prompt_rows_used - before == 43 + 5 * 3


def test_the_best_have_the_largest_mean_log_probability(engine, prompts):
    prompt = prompts[1]
    every = engine.generate(prompt, n=7, logprobs=0, **SAMPLED)
    means = sorted((sum(each.logprobs) / len(each.logprobs) for each in every), reverse=True)
    best = engine.generate(prompt, n=2, best_of=7, **SAMPLED)
    assert [answer.mean_logprob for answer in best] == pytest.approx(means[:2])
    assert engine.generate(prompt, best_of=7, **SAMPLED).token_ids == best[0].token_ids
    assert [each.token_ids for (each,) in engine.generate([prompt], n=1, best_of=7, **SAMPLED)] == [
        best[0].token_ids
    ]


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_several_answers_need_a_temperature(engine, name):
    """At 0 they are equal; equal prompts in a list may be."""
    problem = f"^{name} is 2, but at temperature 0 all answers to a prompt are equal"
    some = [{"temperature": 1.0}, {"temperature": 0.0}]
    for asked in ({"prompts": [1, 2]}, {"prompts": [[1], [2]], "params": some}):
        with pytest.raises(ValueError, match=problem):
            engine.generate(**asked, **{name: 2})
    if name == "n":
        with pytest.raises(ValueError, match=problem):
            engine.sample([1, 2], n=2)
    assert engine.generate([1, 2], **{name: 1}, max_new_tokens=2)
    one, same = engine.generate([[1, 2], [1, 2]], max_new_tokens=4)
    assert one.token_ids == same.token_ids


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 0}, "n must be an integer, 1 or more, got 0"),
        ({"n": 2.5}, "n must be an integer, 1 or more, got 2.5"),
        ({"n": 3, "best_of": 2}, "best_of must be an integer, 3 or more, got 2"),
        ({"logprobs": 21}, "logprobs must be an integer, 0 to 20, got 21"),
        ({"logprobs": True}, "logprobs must be an integer, 0 to 20, got True"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got 'raw'"),
        ({"logprobs_mode": []}, r"logprobs_mode must be 'raw_logprobs' or 'processed_logprobs', got \[\]"),
        ({"seed": [1]}, "seed: a list needs a list of prompts"),
        ({"params": [{}]}, "params: a list needs a list of prompts"),
        ({"prompts": [[1], [2]], "seed": [1]}, "seed: a list of 1 does not fit 2 prompts"),
        ({"prompts": [[1], [2]], "params": [{}, 3]}, "params must be SamplingParams or a mapping"),
        ({"prompts": [[1]], "params": [{}], "seed": 3}, "give seed in params or as a keyword, not both"),
    ],
)
def test_what_cannot_be_sampled_is_one_line(engine, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        engine.generate(**{"prompts": [1, 2], **options})
    assert "\n" not in str(error.value)
