"""Which programs a first request of its kind waits for, and what the background threads compile meanwhile."""

import threading
from collections import Counter
from typing import get_args

import pytest
from tiny_engines import SIZES, TinyEngines, tokens_of

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine import EngineError
from jaxspec.engine.device import programs
from jaxspec.engine.device.lowering import Lowering
from jaxspec.engine.device.plan import Size
from jaxspec.engine.device.programs import Programs
from jaxspec.sampling import Asked, Constraints, Logprobs, SamplingMode
from jaxspec.sampling.grammar import GrammarError
from jaxspec.sampling.mode import modes_for_sampling
from jaxspec.sampling.params import Kind

LOGPROBS, PENALTIES = {"logprobs": 2}, {"presence_penalty": 0.5}
SAMPLED = {"temperature": 1.0, "top_k": 3, "seed": 2}
WHOLE = SIZES["batch_size"]


@pytest.fixture
def compiles(monkeypatch, compiled_ahead):
    """What is compiled, in order, and the thread's name. It cannot run, but takes no time."""
    compiled: list[tuple[Size, str]] = []

    class Lowered:
        def compile(self, options):
            return "a program"

    def lower(lowering, size, grammars):
        compiled.append((size, threading.current_thread().name))
        return Lowered()

    monkeypatch.setattr(Lowering, "lower", lower)
    return compiled


@pytest.fixture
def background(monkeypatch):
    """What is left to the background threads, which compile nothing."""
    left: list[Size] = []
    monkeypatch.setattr(Programs, "compile_in_background", lambda programs, sizes: left.extend(sizes))
    return left


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """Sets how many cores this machine has; four for each background thread that compiles."""
    set_cores = lambda count: monkeypatch.setattr(programs.os, "cpu_count", lambda: count)  # noqa: E731
    set_cores(1)
    return set_cores


@pytest.fixture
def load(tmp_path_factory):
    engines = TinyEngines(tmp_path_factory.mktemp("preparing"))
    yield lambda name="ngram", **sizes: engines.load(name, mixed_prefill_tokens=0, **sizes)
    engines.close()


def ask(engine, **asked):
    return engine.make_request([7, 8, 9], SamplingParams(max_new_tokens=4, **asked))


def test_a_request_waits_for_one_program_that_reads_and_one_that_decodes(load, compiles, background):
    engine = load(slot_sizes=(1,), prefill_batch_size=2)
    compiles.clear()
    background.clear()
    ask(engine, **LOGPROBS)
    top = {"logprobs": Logprobs.TOP}
    reads, decodes = Size(2, 2, **top), Size(WHOLE, 0, SamplingMode.GREEDY, 4, **top)
    assert [size for size, _ in compiles] == [reads, decodes]
    # The others, of which those come first without which requests of two modes cannot share a dispatch.
    modes = modes_for_sampling()
    sampled = [Size(WHOLE, 0, mode, 4, **top) for mode in modes]
    later = [size for size in dict.fromkeys(background) if size not in (reads, decodes)]
    assert later[: len(modes)] == sampled
    assert set(later) == {
        *sampled,
        Size(1, 1, **top),
        *(Size(1, 0, mode, 4, **top) for mode in (SamplingMode.GREEDY, *modes)),
    }
    compiles.clear()
    ask(engine, **LOGPROBS)
    ask(engine, logprobs=0)  # they report this, too
    assert not compiles
    ask(engine, **LOGPROBS, **SAMPLED)
    assert [size for size, _ in compiles] == sampled[-1:]


def test_programs_of_sampling_serve_greedy_requests(load, compiles, background):
    engine = load(slot_sizes=(1,))
    compiles.clear()
    ask(engine, **LOGPROBS, **SAMPLED)
    assert [(size.chunks > 0, size.mode) for size, _ in compiles] == [
        (True, SamplingMode.GREEDY),
        (False, SamplingMode.TRUNCATED),
    ]
    compiles.clear()
    ask(engine, **LOGPROBS)
    assert not compiles


def test_requests_that_no_program_serves_together_run_apart(load, background):
    """Nothing is compiled in the background here, so what they share is never there."""
    engine = load("none")
    params = [
        {**own, "max_new_tokens": 20, "ignore_eos": True}
        for own in (SAMPLED, LOGPROBS, {**SAMPLED, "seed": 5})
    ]
    prompts = [[7, 8, 9], [7, 8, 10], [5, 6]]
    alone = [engine.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)]
    asking = [size.mode for size in engine.programs.compiled if size.width and size.is_asked]
    assert asking == [SamplingMode.GREEDY]
    assert tokens_of(engine.generate(prompts, params)) == alone


def test_nothing_is_compiled_twice(load, compiles, compiled_behind):
    """Neither what is asked for again in other company, nor what waits for a background thread."""
    engine = load(slot_sizes=(1,))
    for asked in (LOGPROBS, PENALTIES, {**LOGPROBS, **PENALTIES}, {"logprobs": 0}, SAMPLED | LOGPROBS):
        ask(engine, **asked)
    engine.programs.wait_compiled()
    assert engine.programs.num_uncompiled == 0
    counts = Counter(size for size, _ in compiles)
    assert max(counts.values()) == 1
    assert counts.keys() == engine.programs.compiled.keys()


@pytest.fixture
def held(monkeypatch, compiles):
    """Holds back compiling in background threads, once it has begun, until it is set."""
    begun, may_go_on = threading.Event(), threading.Event()
    compile_it = Lowering.compile

    def hold(lowering, size, grammars):
        begun.set()
        assert may_go_on.wait(60)
        return compile_it(lowering, size, grammars)

    monkeypatch.setattr(Lowering, "compile", hold)
    may_go_on.begun = begun
    yield may_go_on
    may_go_on.set()


def test_what_a_request_waits_for_goes_first(load, compiles, compiled_behind, held, monkeypatch):
    """While it is compiled, no background thread begins with another."""
    engine = load(slot_sizes=(1,), prefill_batch_size=2)
    assert held.begun.wait(60)
    whole = Programs._compile
    during = []

    def compile_slowly(programs, sizes, progress):
        whole(programs, sizes, progress)
        held.set()  # the one that had begun ends
        with programs._changed:
            assert programs._changed.wait_for(lambda: not programs._compiling - set(sizes), 60)
        engine.programs._background[0].join(0.2)
        during.extend(compiles)

    monkeypatch.setattr(Programs, "_compile", compile_slowly)
    ask(engine, **LOGPROBS)
    # At first prompts, greedy decoding and each mode of sampling, and then what was asked for.
    at_first = 2 + len(modes_for_sampling())
    own = [size.is_asked for size, thread in during if thread != "jaxspec-compile"]
    assert own == [False] * at_first + [True] * 2
    assert len([size for size, thread in during if thread == "jaxspec-compile"]) == 1
    engine.programs.wait_compiled()
    assert engine.programs.num_uncompiled == 0


def test_what_a_background_thread_compiles_already_is_waited_for(load, compiles, compiled_behind, held):
    engine = load(slot_sizes=(1,))
    assert held.begun.wait(60)
    (begun,) = engine.programs._compiling
    threading.Timer(0.1, held.set).start()
    engine.programs.compile([begun], progress=False)
    assert begun in engine.programs.compiled
    engine.programs.wait_compiled()
    assert max(Counter(size for size, _ in compiles).values()) == 1


def test_what_fails_in_the_background_fails_for_who_waits_for_it(
    load, compiles, compiled_behind, held, monkeypatch
):
    engine = load(slot_sizes=(1,))
    assert held.begun.wait(60)
    (begun,) = engine.programs._compiling

    def fail(lowering, size, grammars):
        raise MemoryError(size)

    monkeypatch.setattr(Lowering, "lower", fail)
    threading.Timer(0.1, held.set).start()
    with pytest.raises(MemoryError):
        engine.programs.compile([begun], progress=False)


def test_however_many_kinds_are_asked_for_there_are_no_more_threads(
    load, compiles, compiled_behind, held, cores
):
    cores(8)
    engine = load(slot_sizes=(1,))
    for asked in (LOGPROBS, PENALTIES, {"min_tokens": 2}):
        ask(engine, **asked)
    names = [thread for thread in engine.programs._background if thread.is_alive()]
    assert len(names) == 2
    held.set()
    engine.programs.wait_compiled()
    # Threads end when nothing is left, and others begin when something is.
    ask(engine, bad_words=["5"] if engine.tokenizer else [[5]])
    engine.programs.wait_compiled()
    assert engine.programs.num_uncompiled == 0


def test_kinds_that_are_prepared_keep_no_request_waiting(tiny_config, compiles, background):
    kinds = {
        "logprobs": [LOGPROBS, {"logprobs": 0}],
        "json": [{"json_schema": {"type": "null"}}, {"regex": "w6"}, {"choice": ("w6", "w7")}],
        "penalties": [PENALTIES, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1}],
        "bias": [{"logit_bias": {5: 1.0}}, {"min_tokens": 2}],
        "words": [{"bad_words": ["w6"]}, {"no_repeat_ngram_size": 2}],
    }
    assert set(kinds) == set(get_args(Kind))
    with jaxspec.load(tiny_config, progress=False) as engine:
        engine.prepare()
        plain = len(compiles)
        engine.prepare("json", "logprobs")
        prepared = [size for size, _ in compiles[plain:]]
        both = Asked(Logprobs.TOP, Constraints.GRAMMAR)
        assert [size.doing(Asked()) for size in prepared] == engine.core.preparation.sizes[0]
        assert {Asked(size.logprobs, size.constraints) for size in prepared} == {both}
        compiles.clear()
        for way in ({}, SAMPLED):
            for asked in (*kinds["logprobs"], *kinds["json"]):
                ask(engine, **asked, **way)
            ask(engine, **kinds["json"][0], **LOGPROBS, **way)
        assert not compiles
        for kind, ways in kinds.items():
            engine.prepare(kind)
            compiles.clear()
            for asked in ways:
                ask(engine, **asked)
            assert not compiles
        with pytest.raises(ValueError, match="'jsn' is none of logprobs, json, penalties, bias, words"):
            engine.prepare("logprobs", "jsn")
    with pytest.raises(EngineError, match="closed"):
        engine.prepare(*get_args(Kind)[:3])


def test_grammars_are_not_prepared_where_no_request_can_have_one(load, compiles, background):
    engine = load(slot_sizes=(1,))
    compiles.clear()
    with pytest.raises(GrammarError, match="grammars need a tokenizer"):
        engine.prepare("logprobs", "json")
    assert not compiles
