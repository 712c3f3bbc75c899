"""Penalties, biases and bans are exact under speculation, for every kind of drafter, greedy and sampled.

In one batch with requests that ask for something else and for nothing; from cached prefixes and after a
preemption. Each token has the probability that the definitions give, and a greedy one is the likeliest there,
which is plain decoding's.
"""

import numpy as np
import pytest
from constraint_oracle import constrained
from programs_when_run import compile_now
from test_logprobs import assert_drawn_from_reported, log_softmax, processed
from tiny_engines import DRAWS, limit_pages, modes_of, tokens_of

from jaxspec import SamplingParams, inspect_steps
from jaxspec.engine.device.plan import Size
from jaxspec.sampling import Asked, Constraints, Logprobs, SamplingMode

VOCABULARY, LENGTH = 48, 30
ASKED = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.6},
    {},
    {"logit_bias": {7: 4.0, 20: -100.0, 31: 2.5}, "frequency_penalty": -0.2},
    {"min_tokens": 12, "stop_token_ids": list(range(0, 48, 4))},
    {"bad_words": [[3], [30, 31], [9, 8, 7], [17, 17]], "repetition_penalty": 0.9},
    {"no_repeat_ngram_size": 2},
]
"""One for each of the prompts."""
EVERYTHING = Asked(Logprobs.CHOSEN, Constraints.PENALTIES | Constraints.TOKENS | Constraints.SEQUENCES)
"""What they ask for together. An engine that knows it compiles no programs for less."""
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 30}


def params_of(sampling):
    reported = {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    return [
        {
            "max_new_tokens": LENGTH,
            "ignore_eos": True,
            **reported,
            **sampling,
            **({"seed": i} if sampling else {}),
            **way,
        }
        for i, way in enumerate(ASKED)
    ]


def assert_exact(forward, answer, params):
    """Every token has the probability that the definitions give, and is the likeliest of a greedy answer."""
    prompt, answered = answer.prompt_token_ids, answer.token_ids
    logits = forward((*prompt, *answered))
    rows = np.array(
        [
            constrained(
                logits[len(prompt) - 1 + i],
                [*prompt, *answered[:i]],
                len(prompt),
                params.get("stop_token_ids", ()),
                **{name: value for name, value in params.items() if name != "stop_token_ids"},
            )
            for i in range(len(answered))
        ]
    )
    expected = log_softmax(processed(rows, params))
    chosen = expected[np.arange(len(answered)), answered]
    np.testing.assert_allclose(answer.logprobs, chosen, atol=2e-4, rtol=0)
    if not params.get("temperature"):
        assert (chosen >= expected.max(axis=-1) - 2e-4).all()


# Without a network, one by one from a head and from a whole model, and all at once. `test_grammars.py` asks
# these the other way, and other drafters, for constraints beside grammars.
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("ngram", {}), ("eagle3", {}), ("near", SAMPLED), ("dflash", SAMPLED)],
    ids=["ngram-greedy", "eagle3-greedy", "near-sampled", "dflash-sampled"],
)
def test_drafters(tiny_engines, prompts, forward, monkeypatch, name, sampling):
    engine = tiny_engines.load(name, 3, sampling_modes=modes_of("full", name))
    params = params_of(sampling)
    engine.core.preparation.prepare(EVERYTHING)
    engine.forget_prefixes()
    together, cached = engine.generate(prompts, params), engine.generate(prompts, params)
    assert any(answer.cached_tokens for answer in cached)
    alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    limit_pages(engine, 12, monkeypatch)
    preempted = engine.generate(prompts, params)
    assert engine.core.scheduler.num_preempted
    for answers in (together, cached, alone, preempted):
        assert tokens_of(answers) == tokens_of(together)
        for answer, own in zip(answers, params, strict=True):
            assert_exact(forward, answer, own)
    assert len(together[4].token_ids) > 12 or together[4].finish_reason == "length"
    sources = {source for answer in together for source in answer.token_sources}
    assert sources >= {"first", "accepted", "recovered"}


@pytest.mark.parametrize(("kind", "name", "drawn"), DRAWS[::2], ids=map("-".join, DRAWS[::2]))
def test_samples_have_the_distribution_that_is_reported(engines_of, prompts, kind, name, drawn):
    count, length = 800, 4
    engine = engines_of[kind].load(name, 3, sampling=drawn, batch_size=8)
    asked = {"repetition_penalty": 1.3, "presence_penalty": 0.8, "logit_bias": {5: 2.0}}
    if name == "ngram":  # what it drafts are repeated n-grams
        asked |= {"repetition_penalty": 0.5, "frequency_penalty": -0.5}
    else:
        asked |= {"no_repeat_ngram_size": 2}
    sampling = {"temperature": 0.9, "top_k": 16, "seed": 7, "max_new_tokens": length, "ignore_eos": True}
    reported = {"logprobs": 20, "logprobs_mode": "processed_logprobs"}
    answers = engine.generate(prompts[3] * 2, n=count, **sampling, **reported, **asked)
    assert sum(answer.stats.accepted for answer in answers) > count / 20
    assert_drawn_from_reported(answers, length)


def test_constrained_drafts_are_not_wasted(tiny_engines, prompts):
    """A drafter that is the target itself drafts what the target accepts, whatever changes its logits."""
    engine = tiny_engines.load("self", 3)
    engine.core.preparation.prepare(EVERYTHING._replace(logprobs=Logprobs.NONE))
    for way in (ASKED[0], ASKED[1], ASKED[3], ASKED[6]):
        stats = engine.generate(prompts[2], max_new_tokens=LENGTH, ignore_eos=True, **way).stats
        assert stats.accepted > 0.95 * stats.drafted


def test_drafts_over_a_vocabulary_of_their_own_are_not_wasted(tiny_engines, prompts):
    """Of a token that is far the likeliest, every draft is accepted, whatever its number among drafts."""
    engine = tiny_engines.load("random eagle3", 3)
    number, token = next((i, t) for i, t in enumerate(engine.drafter.target_ids[...].tolist()) if i != t)
    assert token != number
    asked = {"logit_bias": {token: 100.0}, "max_new_tokens": LENGTH, "ignore_eos": True}
    answer = engine.generate(prompts[2], **asked)
    assert answer.token_ids == [token] * LENGTH
    assert answer.stats.accepted == answer.stats.drafted > 0


def test_several_steps_in_a_dispatch(tiny_engines, prompts, forward):
    engine = tiny_engines.load(
        "ngram", 3, steps_per_dispatch=4, prefill_batch_size=3, mixed_prefill_tokens=16
    )
    engine.core.preparation.prepare(EVERYTHING)
    engine.forget_prefixes()
    params = params_of({})
    for answer, own in zip(engine.generate(prompts, params), params, strict=True):
        assert_exact(forward, answer, own)


def test_raw_logprobs_are_those_before_constraints(tiny_engines, prompts, forward):
    engine = tiny_engines.load("ngram")
    answer = engine.generate(prompts[1], max_new_tokens=9, ignore_eos=True, logprobs=0, **ASKED[0])
    rows = log_softmax(forward((*answer.prompt_token_ids, *answer.token_ids)))
    rows = rows[len(answer.prompt_token_ids) - 1 : -1]
    expected = rows[np.arange(len(rows)), answer.token_ids]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4, rtol=0)
    assert (expected < rows.max(axis=-1) - 1e-2).any()


def test_inspection_shows_the_distributions_that_constraints_leave(tiny_engines, prompts, forward):
    """Of one drafter: `test_inspection.py` has the others."""
    engine, way = tiny_engines.load("ngram", 3), {**ASKED[1], "no_repeat_ngram_size": 2}
    found = inspect_steps(engine, prompts[2], max_new_tokens=12, ignore_eos=True, **way)
    answer = engine.generate(prompts[2], max_new_tokens=12, ignore_eos=True, **way)
    assert found.generation.token_ids == answer.token_ids
    for step in found.steps:
        text = [*prompts[2], *answer.token_ids][: step.position + 1]
        row = constrained(forward(tuple(text))[-1], text, len(prompts[2]), **way)
        expected = np.exp(log_softmax(row))
        np.testing.assert_allclose(step.target_probabilities[0], expected, atol=1e-4)


def test_programs_are_chosen_by_what_is_asked(tiny_engines, prompts):
    engine = tiny_engines.load("none", prefill_chunk=4, page_size=4)  # its own
    compile_now(engine.programs)
    used = []
    dispatch = engine.programs.enqueue

    def watched(*args, size):
        used.append(size.constraints)
        return dispatch(*args, size=size)

    def constraints_of(**asked):
        used.clear()
        engine.generate(prompts[1], max_new_tokens=3, **asked)
        return set(used)

    before = dict(engine.programs.compiled)
    engine.programs.enqueue = watched
    assert constraints_of() == {Constraints.NONE}
    assert engine.programs.compiled == before
    assert constraints_of(presence_penalty=1) == {Constraints.PENALTIES}
    count = len(engine.programs.compiled)
    assert constraints_of(repetition_penalty=2) == {Constraints.PENALTIES}
    assert len(engine.programs.compiled) == count
    both = Constraints.PENALTIES | Constraints.TOKENS
    # Requests of both kinds may meet, so what is compiled at once serves both.
    assert constraints_of(min_tokens=2) == {both}
    assert constraints_of(presence_penalty=1) == {Constraints.PENALTIES}
    engine.programs.compile([Size(1, 0, SamplingMode.TRUNCATED, 1, constraints=both)], progress=False)
    assert constraints_of() == {Constraints.NONE}
    assert all(engine.programs.compiled[size] is program for size, program in before.items())
    del engine.programs.enqueue


def test_constraints_that_allow_no_token_fail_their_request_alone(tiny_engines, prompts):
    engine = tiny_engines.load("ngram")
    everything = {"bad_words": [[token] for token in range(VOCABULARY)]}
    requests = [
        engine.make_request(prompts[0], SamplingParams(max_new_tokens=5, ignore_eos=True, **asked))
        for asked in (everything, {"presence_penalty": 1})
    ]
    answers = dict(engine.run(requests))
    assert [answers[i].finish_reason for i in range(2)] == ["failed", "length"]
    assert "or the constraints allow no token there" in answers[0].error
