"""Every option of a request, by every way to ask for an answer: the answer is the one that was asked for."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from options import PROMPT, SAMPLED, SAMPLING, answer_to, assert_complete, fields, parameters, same, submitted

import jaxspec
from jaxspec import AsyncEngine, Engine, SamplingParams, inspect_steps
from jaxspec.engine.api import load as load_module
from jaxspec.files import CheckpointError

TEMPLATE = [{"raw": True}, {"chat_template_kwargs": {"note": "w9"}}]
"""How a prompt is made of what was asked."""
BEGUN = [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"}]
GO_ON = {"continue_final_message": True}
AS_TEXT = {"special_tokens_as_text": True}
WITHOUT_PROGRAMS = (
    *("temperature", "seed", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos"),
    "num_speculative_tokens",
)
"""Parameters that an inspection needs no programs of their own for."""


def test_every_sampling_parameter_changes_the_answer(engine, plain):
    """As the tests below need it to, and as its documentation says."""
    assert_complete("SamplingParams", fields(SamplingParams), SAMPLING)
    for name, change in SAMPLING.items():
        beside = answer_to(engine, PROMPT, dict(change.beside))
        changed = answer_to(engine, PROMPT, change.options(name, plain))
        assert same(changed) != same(beside), name
    for more in TEMPLATE:
        assert answer_to(engine, PROMPT, {}, **more).prompt_token_ids != plain.prompt_token_ids
    assert (
        answer_to(engine, BEGUN, {}, **GO_ON).prompt_token_ids
        != answer_to(engine, BEGUN, {}).prompt_token_ids
    )


def asked(way, engine, options, prompt=PROMPT, **raw):
    """The answer by one of the ways to ask from Python."""
    if way == "generate":
        return engine.generate(prompt, **options, **raw)
    if way == "generate, params":
        return engine.generate(prompt, SamplingParams(**options), **raw)
    if way == "generate, several":
        other = "w9" if isinstance(prompt, str) else BEGUN[1:]
        return engine.generate([other, prompt], options, **raw)[1]
    if way == "stream":
        return list(engine.stream(prompt, **options, **raw))[-1].generation
    if way == "stream, params":
        return list(engine.stream(prompt, options, **raw))[-1].generation
    if way == "async generate":
        return asyncio.run(AsyncEngine(engine).generate(prompt, **options, **raw))
    if way == "async generate, params":
        return asyncio.run(AsyncEngine(engine).generate(prompt, SamplingParams(**options), **raw))
    if way == "async stream":
        return asyncio.run(last(AsyncEngine(engine).stream(prompt, options, **raw)))
    if way == "inspect_steps":
        return inspect_steps(engine, prompt, **options, **raw).generation
    if way == "inspect_steps, params":
        return inspect_steps(engine, prompt, SamplingParams(**options), **raw).generation
    given = {"params": SamplingParams(**options)} if way == "module, params" else options
    return jaxspec.generate(prompt, "a model", **given, **raw)


async def last(deltas):
    return [delta async for delta in deltas][-1].generation


WAYS = [
    "generate",
    "generate, params",
    "generate, several",
    "stream",
    "stream, params",
    "async generate",
    "async generate, params",
    "async stream",
    "inspect_steps",
    "inspect_steps, params",
    "module",
    "module, params",
]


@pytest.fixture(scope="module")
def expected(engine, plain):
    """The answers that every way is to give: to each of `TEMPLATE`, to `BEGUN`, and to each of `SAMPLING`."""
    templates = [same(answer_to(engine, PROMPT, {}, **more)) for more in TEMPLATE]
    changed = {name: answer_to(engine, PROMPT, each.options(name, plain)) for name, each in SAMPLING.items()}
    begun = same(answer_to(engine, BEGUN, {}, **GO_ON))
    return templates, begun, {name: same(answer) for name, answer in changed.items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask_gives_the_answer_that_was_asked_for(way, engine, plain, expected, monkeypatch):
    monkeypatch.setattr(load_module, "load", lambda model, **settings: engine)
    templates, begun, changed = expected
    for more, answer in zip(TEMPLATE, templates, strict=True):
        assert same(asked(way, engine, {}, **more)) == answer, more
    assert same(asked(way, engine, {}, BEGUN, **GO_ON)) == begun
    with pytest.raises(CheckpointError, match="no other tokens for '</s>'"):
        asked(way, engine, {}, "w6 </s>", **AS_TEXT)
    for name, change in SAMPLING.items():
        if "," in way and name not in ("max_new_tokens", "temperature", "stop"):
            continue  # they are passed on as one object
        options = change.options(name, plain)
        if way.startswith("inspect") and name not in WITHOUT_PROGRAMS:
            continue  # others compile programs of their own: see the test below, and `test_constraints.py`
        assert same(asked(way, engine, options)) == changed[name], name


def test_inspection_asks_for_what_it_was_asked_for(engine, plain, monkeypatch):
    made = []
    make = engine.make_request

    def stopping(prompt, params, **options):
        made.append((prompt, params, options))
        raise InterruptedError

    monkeypatch.setattr(engine, "make_request", stopping)
    for name, change in SAMPLING.items():
        options = change.options(name, plain)
        with suppress(InterruptedError):
            inspect_steps(engine, PROMPT, **options, raw=True)
        assert made.pop() == (PROMPT, SamplingParams(**options), {"raw": True})
    assert make(PROMPT, SamplingParams(), raw=True)


# What the ways to ask take beside the fields of `SamplingParams`.
ASKED = {"prompt", "params", "raw", "chat_template_kwargs", *GO_ON, *AS_TEXT}
STREAMED = {"priority": 3, "deadline": 1e-9}
SAMPLES = {"n": 3, "best_of": 4}
MADE = {**STREAMED, "id": "mine", "is_streamed": True}
ARRAYS = {"n": 2, "length": 140}
SCORED = {"lengths": [4, 2], "top": 2, "hidden": 1, "temperature": 0.5}


def test_no_option_of_a_request_is_without_a_test():
    assert_complete("Engine.generate", parameters(Engine.generate), {"prompts"}, ASKED - {"prompt"}, SAMPLES)
    assert_complete("Engine.stream", parameters(Engine.stream), ASKED, STREAMED)
    assert_complete("Engine.make_request", parameters(Engine.make_request), ASKED, MADE)
    assert_complete("Engine.run", parameters(Engine.run), {"requests", "ended"})
    asked = {"prompts", "id"}, ASKED - {"prompt"}, STREAMED, SAMPLES
    assert_complete("AsyncEngine.generate", parameters(AsyncEngine.generate), *asked)
    assert_complete("Engine.sample", parameters(Engine.sample), {"prompts"}, ASKED - {"prompt"}, ARRAYS)
    assert_complete("Engine.score", parameters(Engine.score), {"sequences"}, SCORED)
    arrays = {"prompts"}, ASKED - {"prompt"}, ARRAYS
    assert_complete("AsyncEngine.sample", parameters(AsyncEngine.sample), *arrays)
    assert_complete("AsyncEngine.score", parameters(AsyncEngine.score), {"sequences"}, SCORED)
    assert_complete("AsyncEngine.stream", parameters(AsyncEngine.stream), ASKED, MADE)
    assert_complete("AsyncEngine", parameters(AsyncEngine), {"engine", "max_unfinished"})
    assert_complete("inspect_steps", parameters(inspect_steps), {"engine"}, ASKED)


def test_samples_of_a_prompt_reach_the_engine(engine, monkeypatch):
    monkeypatch.setattr(load_module, "load", lambda model, **settings: engine)
    for generate in (
        engine.generate,
        lambda prompt, **options: jaxspec.generate(prompt, "a model", **options),
        lambda prompt, **options: asyncio.run(AsyncEngine(engine).generate(prompt, **options)),
    ):
        answers = generate(PROMPT, **SAMPLED, **SAMPLES)
        assert len({tuple(answer.token_ids) for answer in answers}) == SAMPLES["n"]
        assert answers == sorted(answers, key=lambda answer: -answer.mean_logprob)
        assert answers[0].mean_logprob > engine.generate(PROMPT, **SAMPLED, logprobs=0).mean_logprob


@pytest.mark.parametrize("is_async", [False, True])
def test_arrays_are_those_that_were_asked_for(engine, is_async):
    def ask(name, *arguments, **options):
        method = getattr(AsyncEngine(engine) if is_async else engine, name)
        return asyncio.run(method(*arguments, **options)) if is_async else method(*arguments, **options)

    samples = ask("sample", PROMPT, **SAMPLED, **ARRAYS)
    assert samples.tokens.shape == (2, 140)
    assert same(samples.generations[0]) == same(answer_to(engine, PROMPT, {**SAMPLED, "logprobs": 0}))
    for more in TEMPLATE:
        (answer,) = ask("sample", PROMPT, SamplingParams(max_new_tokens=3), **more).generations
        assert same(answer) == same(answer_to(engine, PROMPT, {"max_new_tokens": 3, "logprobs": 0}, **more))
    (answer,) = ask("sample", BEGUN, max_new_tokens=3, **GO_ON).generations
    assert same(answer) == same(answer_to(engine, BEGUN, {"max_new_tokens": 3, "logprobs": 0}, **GO_ON))
    with pytest.raises(CheckpointError, match="no other tokens for '</s>'"):
        ask("sample", "w6 </s>", **AS_TEXT)
    rows = np.array([[5, 6, 7, 8], [9, 8, 7, 6]])
    plain, scores = engine.score(rows), ask("score", rows, **SCORED)
    assert (scores.lengths.tolist(), scores.top_tokens.shape, list(scores.hidden)) == ([4, 2], (2, 4, 2), [1])
    assert np.abs(scores.logprobs - plain.logprobs)[scores.mask].min() > 1e-4


@pytest.mark.parametrize("way", ["stream", "async generate", "async stream"])
def test_priority_deadline_name_and_pieces_reach_the_request(way, engine):
    client = AsyncEngine(engine)
    ask = {
        "stream": lambda **options: list(engine.stream(PROMPT, **options)),
        "async generate": lambda **options: asyncio.run(client.generate(PROMPT, **options)),
        "async stream": lambda **options: asyncio.run(last(client.stream(PROMPT, **options))),
    }[way]
    with submitted(engine) as requests:
        ask(priority=3)
        ask(deadline=1e-9)
        ask()
        if way != "stream":
            ask(id="mine")
    first, late, plain, *named = requests
    assert (first.priority, plain.priority) == (3, 0)
    assert (late.finish_reason, plain.finish_reason) == ("aborted", "stop")
    assert plain.is_streamed == (way != "async generate")
    assert all(request.id == "mine" for request in named)


def test_pieces_come_one_by_one_only_where_they_are_wanted(engine):
    async def pieces(**options):
        return [delta async for delta in AsyncEngine(engine).stream(PROMPT, ignore_eos=True, **options)]

    assert len(asyncio.run(pieces(max_new_tokens=40))) > 1
    assert len(asyncio.run(pieces(max_new_tokens=40, is_streamed=False))) == 1


def test_no_more_requests_than_an_async_client_may_have(engine):
    client = AsyncEngine(engine, max_unfinished=0)
    with pytest.raises(jaxspec.QueueFullError):
        asyncio.run(client.generate(PROMPT))
