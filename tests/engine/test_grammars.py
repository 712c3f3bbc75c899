"""Answers follow their grammars, exactly under speculation, for every way to draft, greedy and sampled.

In one batch with requests that have another grammar, penalties, or nothing; from cached prefixes and after a
preemption. Each token has the probability that the masked logits give, and a greedy one is the likeliest
there, which is plain decoding's.
"""

import json
import logging
import re
from functools import partial, reduce
from operator import or_

import jax
import numpy as np
import pytest
from constraint_oracle import constrained
from test_logprobs import assert_drawn_from_reported, log_softmax, processed
from tiny_engines import DRAWS, ONCE, assert_idle, drive_from_python, limit_pages, modes_of, tokens_of
from tiny_grammars import END, SCHEMA, tiny_tokenizer

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.device import step as device_step
from jaxspec.sampling import Asked, Constraints, Logprobs

LENGTH = 30
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 30}
GRAMMARS = ("choice", "regex", "json_schema")
TOKENIZER = tiny_tokenizer()
C, D, E = (TOKENIZER.vocabulary[letter] for letter in "cde")
ASKED = [
    {"regex": "[a-h]{4,20}", "min_tokens": 10, "logit_bias": {C: 3.0}, "bad_words": [[D], [C, E]]},
    {"json_schema": SCHEMA},
    {},
    {"choice": ["abcabc", "bad", "deaf é", "abc, abc, abc, abc, abc, abc"]},
    {"repetition_penalty": 1.4},
    {"regex": "(é|😀){2,4}", "frequency_penalty": 0.6},
    {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 2}},
]
"""One for each of the prompts."""
EVERYTHING = Asked(Logprobs.CHOSEN, reduce(or_, Constraints))
"""What they ask for together. An engine that knows it compiles no programs for less."""


def params_of(sampling):
    reported = {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    return [
        {
            "max_new_tokens": LENGTH,
            "ignore_eos": True,
            "stop_token_ids": [END],
            **reported,
            **sampling,
            **({"seed": i} if sampling else {}),
            **way,
        }
        for i, way in enumerate(ASKED)
    ]


@pytest.fixture(scope="module")
def load(engines_of):
    """Engines whose grammars are over the tiny tokenizer, with rows for forced tokens for all slots."""

    def load(*arguments, attention="full", **options):
        engine = engines_of[attention].load(*arguments, **options)
        engine.core.grammars._tokenizer, engine.core.grammars._ends = TOKENIZER, (END,)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_step, "_ROWS_FORCED", {True: 64, False: 64})
        yield load


def text_of(answer):
    return TOKENIZER.decode([token for token in answer.token_ids if token != END])


def assert_follows(engine, answer, params):
    """The answer is a text of its grammar, or the beginning of one that its length has cut."""
    grammar = SamplingParams(**params).grammar
    if grammar is None:
        return
    automaton = engine.core.grammars.compiled(grammar).automaton
    assert automaton.run(answer.token_ids) >= 0
    if answer.finish_reason == "length":
        assert len(answer.token_ids) == params["max_new_tokens"]
        return
    assert answer.finish_reason == "stop"
    text = text_of(answer)
    if "regex" in params:
        assert re.fullmatch(params["regex"], text)
    elif "choice" in params:
        assert text in params["choice"]
    else:
        assert isinstance(json.loads(text), dict | list)


GREEDY = ("ngram", "near", "dflash", "mtp", "gemma4_assistant")
DRAWN = ("ngram", "eagle3", "dflash", "dspark", "mtp", "gemma4_assistant")
"""Drafters of each way to draft. EAGLE-1 and a table draft one by one as EAGLE-3 does, P-EAGLE all at once as
DFlash. `test_constraints.py` has a greedy EAGLE-3 and a sampled draft model, whose programs take seconds to
compile."""


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param(name, sampling, id=f"{name}-{way}")
        for name in ONCE
        for way, sampling, names in (("greedy", {}, GREEDY), ("sampled", SAMPLED, DRAWN))
        if name in names
    ],
)
def test_drafters(load, prompts, forward_of, monkeypatch, name, sampling):
    kind = ONCE[name]
    engine = load(name, 3, attention=kind, sampling_modes=modes_of(kind, name))
    params = params_of(sampling)
    engine.core.preparation.prepare(EVERYTHING)
    engine.forget_prefixes()
    together, cached = engine.generate(prompts, params), engine.generate(prompts, params)
    alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    limit_pages(engine, 12, monkeypatch)
    preempted = engine.generate(prompts, params)
    assert engine.core.scheduler.num_preempted
    for answers in (together, cached, alone, preempted):
        assert tokens_of(answers) == tokens_of(together)
    for answer, own in zip(together, params, strict=True):
        assert_follows(engine, answer, own)
        assert_exact(engine, partial(forward_of, kind), answer, own)
    assert {together[1].finish_reason, together[3].finish_reason} == {"stop"}
    stats = together[1].stats
    assert stats.accepted >= 6, "tokens without a choice are drafts that are accepted"
    assert_idle(engine)
    assert not any(placed.users for placed in engine.core.grammars._placed)


def assert_exact(engine, forward, answer, params):
    """Every token has the probability that the masked logits give; the likeliest one if it is greedy."""
    grammar = SamplingParams(**params).grammar
    automaton = engine.core.grammars.compiled(grammar).automaton if grammar else None
    own = {name: value for name, value in params.items() if name not in (*GRAMMARS, "stop_token_ids")}
    prompt, answered = answer.prompt_token_ids, answer.token_ids
    logits, rows = forward((*prompt, *answered)), []
    for i in range(len(answered)):
        row = constrained(logits[len(prompt) - 1 + i], [*prompt, *answered[:i]], len(prompt), [END], **own)
        may_come = automaton.allowed(automaton.run(answered[:i])) if automaton else True
        rows.append(np.where(may_come, row, -np.inf))
    expected = log_softmax(processed(np.array(rows), own))
    chosen = expected[np.arange(len(answered)), answered]
    np.testing.assert_allclose(answer.logprobs, chosen, atol=2e-4, rtol=0)
    if not own.get("temperature"):
        assert (chosen >= expected.max(axis=-1) - 2e-4).all()


def never_drafted(engine):
    """A character whose token the engine's head lacks, or any one if it has all; twice."""
    draft_ids, letters = engine.drafter.draft_ids, "klij0123456789abcdefgh"
    lacking = [c for c in letters if draft_ids is not None and draft_ids[...][TOKENIZER.vocabulary[c]] < 0]
    return 2 * (lacking or letters)[0]


@pytest.mark.parametrize(("kind", "name", "drawn"), DRAWS[1::2], ids=map("-".join, DRAWS[1::2]))
def test_samples_have_the_distribution_of_the_masked_logits(load, prompts, kind, name, drawn):
    """Between the free tokens stand two without a choice, which a head with fewer tokens cannot draft."""
    count, length = 800, 6
    engine = load(name, 5, attention=kind, sampling=drawn, batch_size=8)
    sampling = {"temperature": 0.9, "seed": 7, "max_new_tokens": length, "stop_token_ids": [END]}
    reported = {"logprobs": 20, "logprobs_mode": "processed_logprobs"}
    pattern = f"[a-h]{{2}}{never_drafted(engine)}[0-9a-h]{{2}}"
    answers = engine.generate(prompts[3], n=count, regex=pattern, **sampling, **reported)
    assert sum(answer.stats.accepted for answer in answers) > count
    assert_drawn_from_reported(answers, length)


@pytest.mark.parametrize(("name", "slots"), [("eagle3", (1, 3, 3)), ("ngram", (3, 1, 1))])
def test_what_has_no_alternative_is_verified_beyond_the_drafts(load, prompts, name, slots):
    """Up to six tokens more in a step, whatever drafts; of a seeded sample, whose steps may not depend on the
    number of slots, no more than K. Each way over one number of slots for each drafter.
    """
    params = {"regex": "[a-h](klij){8}[0-9]{4}", "max_new_tokens": 50, "stop_token_ids": [END]}
    ways = [{}, SAMPLED, {**SAMPLED, "seed": 3}]
    for way, count, most in zip(ways, slots, (8, 2, 2), strict=True):
        engine = load(name, 2, batch_size=count)
        answer = engine.generate(prompts[1], **params, **way)
        assert_follows(engine, answer, params)
        assert max(accepted for _, accepted in answer.verified) == most
    plain = tokens_of(load("none").generate(prompts, **params))
    assert tokens_of(load(name, 2, batch_size=slots[0]).generate(prompts, **params)) == plain


def test_a_new_grammar_compiles_no_program(load, prompts, caplog):
    engine = load("eagle3", 3)
    engine.generate(prompts[:3], regex="a+b", max_new_tokens=9, stop_token_ids=[END])
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        for i in range(4):
            params = [{"regex": f"[a-h]{{{i},9}}"}, {"choice": ["abc" * i + "d"]}, {"json_schema": SCHEMA}]
            engine.generate(prompts[:3], [{**each, "max_new_tokens": 9} for each in params])
    assert [record.message for record in caplog.records if "ompiling" in record.message] == []


def test_the_length_cuts_a_text_and_says_so(load, prompts):
    answer = load("eagle3", 3).generate(prompts[1], json_schema=SCHEMA, max_new_tokens=5)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
    assert text_of(answer).startswith('{"abba')


def test_requests_wait_until_their_grammars_fit(load, prompts, monkeypatch):
    """In a slab for one grammar, requests with others run one after another, with the same tokens."""
    engine = load("eagle3", 3)
    params = [
        {"regex": f"([a-h]{{2}}{digit}){{2,5}}", "max_new_tokens": 20, "stop_token_ids": [END]}
        for digit in range(len(prompts))
    ]
    expected = tokens_of(engine.generate(prompts, params))
    grammars = engine.core.grammars
    grammars.lose()
    pages = grammars.compiled(SamplingParams(**params[0]).grammar).pages
    monkeypatch.setattr(grammars, "_num_pages", 1 + pages)
    assert tokens_of(engine.generate(prompts, params)) == expected
    assert_idle(engine)


def test_after_the_device_failed_answers_go_on(load, prompts, monkeypatch):
    engine = load("eagle3", 3)
    params = params_of(SAMPLED)
    expected = tokens_of(engine.generate(prompts, params))
    enqueue, calls = engine.programs.enqueue, []

    def failing(*arguments, **options):
        begun = [run.request for run in engine.core.scheduler.running if len(run.request.token_ids) > 1]
        # In a schema's text, what may follow the first tokens may not begin it.
        if not calls and any(request.params.json_schema for request in begun):
            calls.append(options)
            raise RuntimeError("the device fails")
        return enqueue(*arguments, **options)

    monkeypatch.setattr(engine.programs, "enqueue", failing)
    assert tokens_of(engine.generate(prompts, params)) == expected
    assert calls
    assert_idle(engine)


def test_a_slot_forgets_the_grammar_of_the_request_before(load, prompts):
    """Also if its next request begins in a program without grammars, and then one with a grammar joins it."""
    engine = load("ngram", 3)
    long = {"max_new_tokens": 80, "ignore_eos": True}
    expected = engine.generate([5, 6, 7], **long).token_ids
    engine.generate(prompts[0], regex="[a-h]{50,90}", max_new_tokens=5)
    plain = engine.make_request([5, 6, 7], SamplingParams(**long))
    joining = engine.make_request(prompts[1], SamplingParams(json_schema=SCHEMA, stop_token_ids=[END]))
    plain.is_streamed = True
    waiting = [joining]

    def join(piece):
        if waiting and piece.token_ids:
            engine.submit([waiting.pop()], lambda request: lambda piece: None)

    engine.submit([plain], lambda request: join)
    assert engine.wait_idle(timeout=60)
    assert not waiting
    assert plain.token_ids == expected
    assert_idle(engine)


def test_the_host_drives_the_same_tokens(load, prompts, monkeypatch):
    engine = load("eagle3", 3)
    params = [{**own, "max_new_tokens": 16} for own in params_of({})]  # two pages
    expected = tokens_of(engine.generate(prompts, params))
    assert drive_from_python(engine, monkeypatch) == []
    assert tokens_of(engine.generate(prompts, params)) == expected


def test_inspection_sees_the_masked_distributions(load, prompts):
    engine = load("ngram", 3)
    params = {"json_schema": SCHEMA, "max_new_tokens": 30, "stop_token_ids": [END]}
    report = jaxspec.inspect_steps(engine, prompts[1], **params)
    automaton = engine.core.grammars.compiled(SamplingParams(**params).grammar).automaton
    tokens = engine.generate(prompts[1], **params).token_ids
    assert [token for step in report.steps for token in step.tokens] == tokens[1:]
    read = 1
    for step in report.steps:
        may_come = automaton.allowed(automaton.run(tokens[:read]))
        assert not step.target_probabilities[0][~may_come].any()
        read += len(step.tokens)


def test_drafts_over_a_vocabulary_of_their_own_follow_the_grammar(load, prompts):
    """Others would be rejected, which no token shows."""
    engine, regex = load("random eagle3", 3), "[a-h]{90}"
    report = jaxspec.inspect_steps(engine, prompts[1], regex=regex, max_new_tokens=20)
    automaton = engine.core.grammars.compiled(SamplingParams(regex=regex).grammar).automaton
    answered = report.generation.token_ids[:1]
    for step in report.steps:
        assert automaton.run([*answered, *step.draft_tokens]) >= 0
        answered += step.tokens
    assert len(answered) == 20


def test_inspection_leaves_out_rows_for_forced_tokens_where_a_compiled_step_does(load, prompts):
    engine = load("eagle3", 2, batch_size=1)
    seen = set()
    for text in ("([ab]{2}c){6}", "([ab]{3}c){5}", "([ab]{4}c){4}"):
        params = {"regex": text, "max_new_tokens": 30, "stop_token_ids": [END]}
        steps = engine.generate(prompts[1], **params).verified
        seen |= {drafts for drafts, _ in steps}
        assert jaxspec.inspect_steps(engine, prompts[1], **params).generation.verified == steps
    assert seen == {2, 8}


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"regex": "(a"}, "regex '(a': missing )"),
        ({"regex": "a", "choice": ["a"]}, "regex: only one of choice, regex and json_schema may be given"),
        ({"choice": ["a", ""]}, "choice must be a list of strings, none of them empty"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": {"type": "array", "contains": {}}}, "json_schema at $: 'contains' is not supported"),
        ({"regex": "(a|b)*a(a|b){14}"}, "regex: the grammar is too large"),
        ({"regex": "zzz"}, "regex: the grammar accepts no text that the model's tokens can spell"),
    ],
)
def test_a_bad_grammar_is_refused_in_one_line(load, prompts, asked, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        load("none").generate(prompts[0], **asked)


def test_a_grammar_needs_a_tokenizer_and_an_end(load, prompts):
    engine = load("none")
    grammars = engine.core.grammars
    grammars._tokenizer = None
    vars(grammars).pop("_vocabulary", None)
    with pytest.raises(ValueError, match=r"^regex: grammars need a tokenizer, and this checkpoint has none"):
        engine.generate(prompts[0], regex="never compiled before")
