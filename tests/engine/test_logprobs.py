"""Log-probabilities are those of a plain forward pass and of `Engine.score`, whatever drafts.

Whether a token is an accepted draft, recovered, a bonus or the first one; greedy and sampled; alone, in
company that asks for something else, from cached prefixes, after a preemption and after a failed dispatch.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from target_checks import log_softmax
from tiny_engines import DRAFTERS, assert_scored, limit_pages, modes_of, tokens_of

from jaxspec.engine.device.plan import Size
from jaxspec.sampling import Logprobs, SamplingMode

VOCABULARY = 48
PAIRS = [
    *((kind, "ngram") for kind in ("full", "recurrent")),
    *(("full", name) for name in ("near", "dflash")),
]
"""Without a network, one by one and all at once. Every drafter reports in `test_grammars.py`; other kinds of
attention write no other logits, and `test_scores.py` asks for scores over each."""
WAYS = [
    {"logprobs": 20},
    {"temperature": 0.8, "top_p": 0.7, "seed": 3, "logprobs": 5, "logprobs_mode": "processed_logprobs"},
    {"temperature": 1.2, "top_k": 9, "seed": 4, "logprobs": 0},
    {"temperature": 1.0, "seed": 5},
    {},
    {"temperature": 1.0, "min_p": 0.2, "seed": 6, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"logprobs": 0, "logprobs_mode": "processed_logprobs"},
]
"""One for each of the prompts."""


def processed(logits, way):
    """What is sampled from, by the definitions of temperature, min-p, top-k and top-p."""
    if not way.get("temperature"):
        return logits
    x = log_softmax(logits / way["temperature"])
    x = np.where(x < x.max(-1, keepdims=True) + np.log(way.get("min_p", 0) or 1e-30), -np.inf, x)
    falling = np.sort(x, axis=-1)[:, ::-1]
    if way.get("top_k"):
        x = np.where(x < falling[:, way["top_k"] - 1 : way["top_k"]], -np.inf, x)
    p = np.exp(log_softmax(x))
    order = np.argsort(-p, axis=-1)
    kept = np.take_along_axis(p, order, -1).cumsum(-1) - np.take_along_axis(p, order, -1) < way.get(
        "top_p", 1
    )
    return np.where(np.take_along_axis(kept, np.argsort(order, axis=-1), -1), x, -np.inf)


def is_raw(way):
    """Whether the model's own log-probabilities are reported, which those of a greedy answer always are."""
    return "logprobs" in way and not ("logprobs_mode" in way and way.get("temperature"))


def assert_exact(forward, kind, answer, way):
    if "logprobs" not in way:
        assert (answer.logprobs, answer.top_logprobs) == (None, None)
        return
    logits = forward(kind, [*answer.prompt_token_ids, *answer.token_ids])
    logits = logits[len(answer.prompt_token_ids) - 1 : -1]
    expected = log_softmax(processed(logits, way) if "logprobs_mode" in way else logits)
    chosen = expected[np.arange(len(logits)), answer.token_ids]
    np.testing.assert_allclose(answer.logprobs, chosen, atol=1e-4, rtol=0)
    if not way["logprobs"]:
        assert answer.top_logprobs is None
        return
    assert len(answer.top_logprobs) == len(answer.token_ids)
    for top, row in zip(answer.top_logprobs, expected, strict=True):
        best = [value for value in np.sort(row)[::-1][: way["logprobs"]] if value > -np.inf]
        np.testing.assert_allclose(list(top.values()), best, atol=1e-4, rtol=0)
        np.testing.assert_allclose(row[list(top)], best, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "name"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_they_are_those_of_a_plain_forward_pass(engines_of, prompts, forward_of, kind, name, monkeypatch):
    engine = engines_of[kind].load(name, DRAFTERS[name], sampling_modes=modes_of(kind, name))
    params = [{**way, "max_new_tokens": 30, "ignore_eos": True} for way in WAYS]
    engine.forget_prefixes()
    silent = [{key: value for key, value in own.items() if "logprobs" not in key} for own in params]
    expected = tokens_of(engine.generate(prompts, silent))
    alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    engine.forget_prefixes()
    together, cached = engine.generate(prompts, params), engine.generate(prompts, params)
    assert any(answer.cached_tokens for answer in cached)
    limit_pages(engine, 12, monkeypatch)
    preempted = engine.generate(prompts, params)
    assert engine.core.scheduler.num_preempted
    for answers in (alone, together, cached, preempted):
        assert tokens_of(answers) == expected
        for answer, way in zip(answers, WAYS, strict=True):
            assert_exact(forward_of, kind, answer, way)
        raw = [answer for answer, way in zip(answers, WAYS, strict=True) if is_raw(way)]
        assert_scored(engine, raw, top=20)
    if kind == "full":
        sources = {source for answer in together for source in answer.token_sources}
        assert sources >= {"first", "accepted", "recovered"}


def test_a_failed_dispatch_costs_none_and_reports_none_twice(tiny_engines, prompts, monkeypatch):
    engine = tiny_engines.load("ngram")
    params = [{**way, "max_new_tokens": 20, "ignore_eos": True} for way in WAYS]
    expected = engine.generate(prompts, params)
    dispatch, number = engine.programs.enqueue, iter(range(1000))

    def failing(*args, size):
        result = dispatch(*args, size=size)
        if next(number) == 12:
            jax.block_until_ready(result)
            raise jax.errors.JaxRuntimeError("INTERNAL: the bus fell off")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "enqueue", failing)
        found = engine.generate(prompts, params)
    assert next(number) > 13
    for answer, before, way in zip(found, expected, WAYS, strict=True):
        assert answer.token_ids == before.token_ids
        if "logprobs" in way:
            np.testing.assert_allclose(answer.logprobs, before.logprobs, atol=1e-5)


def test_prompts_beside_answers_where_only_some_programs_are_compiled(tiny_engines, prompts, monkeypatch):
    """Of programs that read prompts beside decoding, the background compiles one after the other; a number of
    chunks that no program reads would fail a round."""
    engine = tiny_engines.load("ngram", mixed_prefill_tokens=16, prefill_batch_size=3, steps_per_dispatch=2)
    # Each ends at another time. First only silent ones run, while others wait in the queue.
    silent = [{"max_new_tokens": 8 + 3 * i} for i in range(len(prompts))]
    mixed = [{**own, "logprobs": 20} if i > 3 else own for i, own in enumerate(silent)]
    expected = tokens_of(engine.generate(prompts, silent))
    beside = [size for size in engine.core.preparation.sizes[1] if size.width and size.chunks]
    errors, recover = [], engine.core._recover
    monkeypatch.setattr(engine.core, "_recover", lambda error: errors.append(error) or recover(error))
    for sizes in ([], [replace(size, logprobs=Logprobs.TOP) for size in beside], beside):
        engine.programs.compile(sizes, progress=False)
        answers = engine.generate(prompts, mixed)
        assert tokens_of(answers) == expected
        assert [answer.logprobs is None for answer in answers] == [True] * 4 + [False] * 3
        assert not errors


def test_pieces_of_a_stream_carry_their_own(tiny_engines, prompts):
    engine = tiny_engines.load("ngram")
    *pieces, last = engine.stream(prompts[1], max_new_tokens=30, logprobs=2)
    answer = last.generation
    assert len(pieces) > 1
    every = [*pieces, last]
    assert [value for piece in every for value in piece.logprobs] == answer.logprobs
    assert [top for piece in every for top in piece.top_logprobs] == answer.top_logprobs
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in every)
    assert len(answer.logprobs) == len(answer.token_ids)
    plain = list(engine.stream(prompts[1], max_new_tokens=30, logprobs=0))
    assert {piece.top_logprobs for piece in plain} == {None}
    assert {piece.logprobs for piece in engine.stream(prompts[1], max_new_tokens=3)} == {None}


def assert_drawn_from_reported(answers, length):
    """A chi-square of the tokens of each position, against the sum of what was reported for it: all of the
    distribution that they were drawn from."""
    for place in range(length):
        expected, seen = np.zeros(VOCABULARY), np.zeros(VOCABULARY)
        for answer in answers:
            if place < len(answer.token_ids):
                top = answer.top_logprobs[place]
                expected[list(top)] += np.exp(list(top.values()))
                seen[answer.token_ids[place]] += 1
        np.testing.assert_allclose(expected.sum(), seen.sum(), rtol=1e-4)
        assert not seen[expected == 0].any()
        rare = expected < 5
        expected, seen = (np.append(x[~rare], x[rare].sum()) for x in (expected, seen))
        statistic = ((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
        freedom = len(seen) - 1
        assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4, (place, statistic, freedom)


def test_tokens_are_drawn_from_what_is_reported(tiny_engines, prompts):
    count, length = 1200, 4
    engine = tiny_engines.load("near", 3, batch_size=8)
    sampling = {"temperature": 0.9, "top_k": 16, "seed": 7, "max_new_tokens": length, "ignore_eos": True}
    reported = {"logprobs": 20, "logprobs_mode": "processed_logprobs"}
    answers = engine.generate(prompts[3], n=count, **sampling, **reported)
    assert sum(answer.stats.accepted for answer in answers) > count / 2
    assert all(len(top) <= 17 for answer in answers for top in answer.top_logprobs)
    assert_drawn_from_reported(answers, length)


def test_programs_that_report_are_compiled_when_first_asked_for(engines_of, prompts):
    engine = engines_of["full"].load("none", prefill_chunk=4)  # its own
    assert not any(size.logprobs for size in engine.programs.compiled)
    used = []
    dispatch = engine.programs.enqueue

    def watched(*args, size):
        used.append(size)
        return dispatch(*args, size=size)

    engine.programs.enqueue = watched
    engine.generate(prompts[1], max_new_tokens=3, logprobs=3)
    assert {size.logprobs for size in used} == {Logprobs.TOP}
    count = len(engine.programs.compiled)
    # The cheapest of those that fit, if it were not left out.
    engine.programs.compile([Size(1, 0, SamplingMode.TRUNCATED, 1, Logprobs.TOP)], progress=False)
    count += 1
    used.clear()
    # Whoever asks for less is served by them, and who asks for nothing is not.
    engine.generate(prompts[1], max_new_tokens=3, logprobs=0)
    assert {size.logprobs for size in used} == {Logprobs.TOP}
    used.clear()
    engine.generate(prompts[1], max_new_tokens=3)
    assert {size.logprobs for size in used} == {Logprobs.NONE}
    assert len(engine.programs.compiled) == count
    del engine.programs.enqueue
