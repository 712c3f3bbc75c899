"""A request's life, from queued to its end, and what the engine does when its device fails."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import SIZES, tokens_of

import jaxspec
from jaxspec import AsyncEngine, EngineError, SamplingParams
from jaxspec.engine.device.outcome import read_outcomes
from jaxspec.engine.device.plan import Plan
from jaxspec.engine.rounds import core
from jaxspec.engine.rounds.core import MAX_FAILURES, EngineCore

LONG = SamplingParams(max_new_tokens=66, ignore_eos=True)


@pytest.fixture
def engine(tiny_engines):
    return tiny_engines.load("ngram")


def fail_after(engine, monkeypatch, decodes, *numbers):
    """Has dispatches with these numbers, of those that decode or do not, lose the donated state and raise."""
    calls = []
    enqueue = engine.programs.enqueue

    def failing(*args, size):
        result = enqueue(*args, size=size)
        if bool(size.width) == decodes:
            calls.append(1)
            if len(calls) in numbers:
                jax.block_until_ready(result)
                raise jax.errors.JaxRuntimeError("INTERNAL: the bus fell off\nand more")
        return result

    monkeypatch.setattr(engine.programs, "enqueue", failing)


def test_a_request_says_where_it_is(engine, prompts):
    requests = [engine.make_request(prompt, LONG, is_streamed=True) for prompt in prompts[:5]]
    assert [request.status for request in requests] == ["new"] * 5
    assert [request.id for request in requests] == sorted({request.id for request in requests})
    seen, began = {}, threading.Event()

    def look(piece):
        seen.setdefault("status", [request.status for request in requests])
        began.set()

    engine.submit(requests, lambda request: look)
    assert began.wait(60)
    assert engine.wait_idle(60)
    assert seen["status"] == ["running"] * 3 + ["queued"] * 2
    assert [request.status for request in requests] == ["finished"] * 5
    assert all(r.arrived_at <= r.first_token_at <= r.finished_at for r in requests)


def test_a_request_runs_once(engine):
    request = engine.make_request([1, 2], SamplingParams(max_new_tokens=3))
    assert len(dict(engine.run([request]))) == 1
    for again in (lambda: engine.submit([request], lambda r: print), lambda: list(engine.run([request]))):
        with pytest.raises(ValueError, match=f"request {request.id} has been queued before"):
            again()
    twice = engine.make_request([1, 2], SamplingParams(max_new_tokens=3), id="mine")
    with pytest.raises(ValueError, match="request mine has been queued before"):
        list(engine.run([twice, twice]))


def test_a_cancelled_request_ends_as_aborted_wherever_it_is(engine, prompts):
    requests = [engine.make_request(prompts[0], LONG) for _ in range(6)]
    queued, running = requests[5], requests[0]
    engine.abort(queued)
    run = engine.run(requests)
    index, generation = next(run)
    assert index == 5
    assert (generation.finish_reason, generation.error) == ("aborted", "it was cancelled")
    assert generation.token_ids == []
    engine.abort(running)
    rest = dict(run)
    assert sorted(rest) == [0, 1, 2, 3, 4]
    assert rest[0].finish_reason == "aborted"
    assert len(rest[0].token_ids) < 70
    assert all(rest[i].finish_reason == "length" for i in (1, 2, 3, 4))


@pytest.mark.parametrize("how", ["stream", "run", "dropped stream", "async stream"])
def test_what_nobody_reads_any_more_is_given_back_at_once(tiny_engines, prompts, monkeypatch, how):
    """The device waits in the middle of the answer until the reader has gone."""
    # With more steps a dispatch, the answer would end before the device waits.
    engine = tiny_engines.load("ngram", steps_per_dispatch=1)
    gone, decodes = threading.Event(), []
    enqueue = engine.programs.enqueue

    def waiting(*args, size):
        decodes.extend([1] * bool(size.width))
        assert len(decodes) < 10 or gone.wait(60)
        return enqueue(*args, size=size)

    async def read_one():
        stream = AsyncEngine(engine).stream(prompts[0], LONG)
        await anext(stream)
        await stream.aclose()
        gone.set()
        # A loop that has ended would abort it, too.
        assert await asyncio.to_thread(engine.wait_idle, 60)

    monkeypatch.setattr(engine.programs, "enqueue", waiting)
    if how == "async stream":
        asyncio.run(read_one())
    else:
        if how == "run":
            requests = (engine.make_request(prompts[0], LONG) for _ in range(20))
            reader = engine.run([engine.make_request([1], SamplingParams(max_new_tokens=1)), *requests])
        else:
            reader = engine.stream(prompts[0], LONG)
        next(reader)
        if how != "dropped stream":
            reader.close()
        del reader
        gone.set()
    assert engine.wait_idle(60)
    # At least 18 to its end, of at most four tokens each.
    assert len(decodes) <= 11


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"priority": None}, "priority must be an integer, got None"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": float("nan")}, "priority must be an integer"),
        ({"deadline": 0}, "deadline must be a number of seconds above 0, got 0"),
        ({"deadline": float("nan")}, "deadline must be"),
        ({"deadline": "5"}, "deadline must be a number of seconds above 0, got '5'"),
        ({"deadline": 1 + 0j}, "deadline must be"),
    ],
)
def test_what_is_no_priority_or_deadline_is_refused_at_once(engine, what, why):
    with pytest.raises(ValueError, match=why):
        engine.stream([1, 2], **what)
    assert len(engine.generate([1, 2], max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.timeout(10, func_only=True)
def test_a_request_that_was_cancelled_before_it_was_queued_ends(engine):
    request = engine.make_request([1, 2], LONG)
    engine.abort(request)
    assert engine.wait_idle(60)
    ((index, generation),) = engine.run([request])
    assert (index, generation.finish_reason, generation.error) == (0, "aborted", "it was cancelled")


def test_a_run_leaves_a_request_of_another_caller_alone(engine):
    request = engine.make_request([1, 2], LONG)
    ended = threading.Event()
    engine.submit([request], lambda request: lambda piece: ended.set())
    with pytest.raises(ValueError, match="has been queued before"):
        list(engine.run([request]))
    assert ended.wait(60)
    assert request.finish_reason == "length"


def test_a_command_that_fails_ends_every_request(tiny_engines, prompts, caplog):
    """Nobody may wait for a thread that has died."""
    with jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES) as engine:
        run = engine.run([engine.make_request(prompt, LONG) for prompt in prompts])
        engine._thread.put(lambda core: 1 / 0)
        with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError"):
            list(run)
        with pytest.raises(EngineError, match="the engine failed"):
            engine.generate([1, 2])
        assert engine._thread._thread.is_alive()


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_priority_and_a_deadline_may_be_numbers_of_arrays(engine, prompts, of):
    request = engine.make_request(prompts[0], LONG, priority=of(3), deadline=of(1000.0))
    assert request.priority == 3
    assert 0 < request.deadline - time.monotonic() <= 1000


def test_a_deadline_aborts_what_has_not_ended(engine, prompts):
    hopeless = engine.make_request(prompts[0], LONG, deadline=1e-9)
    fine = engine.make_request(prompts[0], LONG, deadline=1000)
    generations = dict(engine.run([hopeless, fine]))
    assert (generations[0].finish_reason, generations[0].error) == ("aborted", "its deadline has passed")
    assert generations[1].finish_reason == "length"
    with pytest.raises(ValueError, match="deadline must be a number of seconds above 0, got 0"):
        engine.make_request([1], LONG, deadline=0)


def test_priority_comes_before_arrival(tiny_engines):
    engine = tiny_engines.load("none", batch_size=1)
    params = SamplingParams(max_new_tokens=2)
    requests = [
        engine.make_request([i], params, priority=priority) for i, priority in enumerate((0, 0, 5, 1))
    ]
    engine.submit(requests, lambda request: lambda piece: None)
    assert engine.wait_idle(60)
    assert sorted(range(4), key=lambda i: requests[i].finished_at) == [2, 3, 0, 1]


@pytest.mark.parametrize("name", ["none", "ngram", "eagle3", "near", "dflash"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decodes", [False, True])
def test_a_failed_dispatch_costs_the_state_and_no_token(
    tiny_engines, prompts, monkeypatch, caplog, name, temperature, decodes
):
    engine = tiny_engines.load(name)
    ask = {"max_new_tokens": 30, "temperature": temperature, "seed": 4}
    expected = engine.generate(prompts, **ask)
    engine.forget_prefixes()
    fail_after(engine, monkeypatch, decodes, 3, 9)
    again = engine.generate(prompts, **ask)
    assert tokens_of(again) == tokens_of(expected)
    assert [g.finish_reason for g in again] == [g.finish_reason for g in expected]
    assert "INTERNAL: the bus fell off" in caplog.text


def test_results_that_cannot_be_read_are_computed_again(engine, prompts, monkeypatch, caplog):
    expected = tokens_of(engine.generate(prompts, max_new_tokens=30))
    read, calls = core.read_outcomes, []

    def failing(output):
        calls.append(output)
        if len(calls) in (3, 7):
            raise jax.errors.JaxRuntimeError("INTERNAL: lost on the way")
        return read(output)

    monkeypatch.setattr(core, "read_outcomes", failing)
    assert tokens_of(engine.generate(prompts, max_new_tokens=30)) == expected
    assert caplog.text.count("lost on the way") == 2


def test_an_engine_whose_device_keeps_failing_says_so_in_every_call(tiny_engines, monkeypatch):
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES)
    assert MAX_FAILURES == 2
    fail_after(engine, monkeypatch, True, 2, 3, 4)
    dead = "the device failed: INTERNAL: the bus fell off$"
    with pytest.raises(EngineError, match=dead):
        engine.generate([[1, 2], [3]], max_new_tokens=20)
    for call in (engine.generate, lambda prompt: next(engine.stream(prompt))):
        with pytest.raises(EngineError, match=dead):
            call([1, 2])
    assert engine.core.scheduler.pages.num_free == engine.config.num_pages
    assert not hasattr(engine.core, "state")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_logits_that_are_not_finite_end_their_request_and_no_other(
    tiny_engines, prompts, monkeypatch, temperature, at
):
    """What one slot's first page holds becomes NaN, after its prompt or in the middle of its answer."""
    engine = tiny_engines.load("eagle3")
    asked = [prompts[2], prompts[1]]
    ask = {"max_new_tokens": 30, "temperature": temperature, "seed": 4}
    expected = tokens_of(engine.generate(asked, **ask))
    engine.forget_prefixes()
    enqueue, calls = engine.programs.enqueue, []

    def poisoned(state, words, *, size):
        calls.extend([1] * bool(size.width))
        if size.width and len(calls) == (1 if at == "prompt" else 2):
            page = Plan.unpack(words, size, engine.config).page_table.pages[0, 0]
            cache = jax.tree.map(lambda layer: layer.at[page].set(jnp.nan), state.target_cache)
            state = replace(state, target_cache=cache)
        return enqueue(state, words, size=size)

    monkeypatch.setattr(engine.programs, "enqueue", poisoned)
    bad, good = engine.generate(asked, **ask)
    assert good.token_ids == expected[1]
    assert bad.finish_reason == "failed"
    at_position = len(asked[0]) + len(bad.token_ids) - 1
    assert bad.error == f"the target's logits are NaN or infinite at position {at_position}"
    assert bad.token_ids == expected[0][: len(bad.token_ids)]
    assert (len(bad.token_ids) == 1) == (at == "prompt")


def test_logits_after_a_prompt_that_are_not_finite_fail_it(engine, prompts, monkeypatch):
    def poisoned(packed):
        of_slots, of_chunks = read_outcomes(packed)
        failed = np.ones_like(of_chunks.failed)
        return of_slots, replace(of_chunks, num_tokens=0 * of_chunks.num_tokens, done=failed, failed=failed)

    monkeypatch.setattr(core, "read_outcomes", poisoned)
    generation = engine.generate(prompts[0], max_new_tokens=5)
    assert (generation.finish_reason, generation.token_ids) == ("failed", [])
    assert generation.error == "the target's logits are NaN or infinite at position 2"


def test_a_tokenizer_that_fails_fails_its_request_alone(tiny_engine):
    """Its panics are no `Exception`."""

    class Broken:
        backend = tiny_engine.tokenizer.backend

        def decode(self, ids):
            raise BaseException("panic")

    params = SamplingParams(max_new_tokens=4)
    requests = [tiny_engine.make_request([7, 8], params) for _ in range(2)]
    requests[0].tokenizer = Broken()
    generations = dict(tiny_engine.run(requests))
    assert generations[0].finish_reason == "failed"
    assert generations[0].error == "its text cannot be decoded: BaseException('panic')"
    assert generations[1].finish_reason == "length"


def test_a_listener_that_raises_aborts_its_request_alone(engine, prompts):
    requests = [engine.make_request(prompts[0], LONG, is_streamed=True) for _ in range(2)]
    pieces = []

    def gone(piece):
        raise RuntimeError("no loop")

    engine.submit(requests, lambda request: gone if request is requests[0] else pieces.append)
    assert engine.wait_idle(60)
    assert [request.finish_reason for request in requests] == ["aborted", "length"]
    assert "its listener raised" in requests[0].error


def test_a_closed_engine_holds_no_array(tiny_engines, prompts):
    def live():
        gc.collect()
        return {id(array): array.nbytes for array in jax.live_arrays()}

    before = live()
    engine = jaxspec.load(
        tiny_engines.folders["target"],
        drafter={"kind": "eagle3", "source": str(tiny_engines.folders["eagle3"])},
        progress=False,
        **SIZES,
    )
    assert jaxspec.inspect_steps(engine, prompts[0], max_new_tokens=5).steps
    assert sum(live().values()) > sum(before.values()) + 100_000
    engine.close()
    assert live().keys() <= before.keys()
    with pytest.raises(EngineError, match="closed"):
        jaxspec.inspect_steps(engine, prompts[0])


def test_a_closed_engine_ends_its_requests_and_refuses_more(tiny_engines, prompts):
    with jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES) as engine:
        stream = engine.stream(prompts[0], LONG)
        next(stream)
        requests = [engine.make_request(prompts[0], LONG) for _ in range(5)]
        engine.submit(requests, lambda request: lambda piece: None)
    assert [request.status for request in requests] == ["aborted"] * 5
    *_, last = stream
    assert last.generation.finish_reason == "aborted"
    assert last.generation.error == "the engine was closed"
    with pytest.raises(EngineError, match="the engine was closed"):
        engine.generate(prompts[0])
    assert not engine.wait_prepared(60)
    engine.close()


def test_whoever_waits_for_an_engine_is_let_go_when_it_is_closed(tiny_engines, prompts, monkeypatch):
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES)
    programs = engine.programs
    monkeypatch.setattr(programs, "num_uncompiled", 1)  # it is never prepared
    waits = [threading.Thread(target=wait, daemon=True) for wait in (engine.wait_prepared, engine.wait_idle)]
    for wait in waits:
        wait.start()
    engine.generate(prompts[0], max_new_tokens=2)
    assert waits[0].is_alive()
    engine.close()
    for wait in waits:
        wait.join(30)
        assert not wait.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs Unix")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_an_engine_in_a_forked_process_says_so(engine):
    """Its thread has stayed behind, and the call would never return."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            engine.generate([1, 2])
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        assert said.read() == "EngineError: the engine does not work in a forked process: load it there"
    os.waitpid(child, 0)


def test_an_engine_that_nobody_holds_ends_its_thread(tiny_engines):
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES)
    engine.generate([1, 2], max_new_tokens=3)
    core, thread = weakref.ref(engine.core), engine._thread._thread
    assert isinstance(core(), EngineCore)
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert core() is None


def test_an_engine_that_nobody_holds_answers_what_it_was_asked(tiny_engines):
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES)
    pieces = SimpleQueue()
    request = engine.make_request([1, 2], SamplingParams(max_new_tokens=3, ignore_eos=True))
    engine.submit([request], lambda request: pieces.put)
    del engine
    assert pieces.get(timeout=30).generation.finish_reason == "length"


DROPS_ITS_ENGINE = """
import sys, threading, time
import jaxspec
from jaxspec.engine.rounds.core import EngineCore
from jaxspec.engine.device.programs import Programs

# A process also waits for those that compile, which would hide whether it waits for the engine.
Programs.compile_in_background = lambda *_: None
step, began = EngineCore.step, threading.Event()

def slow(core):
    step(core)
    began.set()
    time.sleep(0.5)
    print("read", flush=True)

def use():
    engine = jaxspec.load(sys.argv[1], progress=False, batch_size=1, max_model_len=96)
    EngineCore.step = slow
    engine.submit([engine.make_request([1, 2], jaxspec.SamplingParams())], lambda request: print)
    began.wait()

use()
print("exits", flush=True)
"""


def test_a_process_waits_for_the_thread_of_an_engine_that_nobody_holds(tiny_engines):
    """JAX must not free its devices while a round is being read."""
    done = subprocess.run(
        [sys.executable, "-c", DROPS_ITS_ENGINE, tiny_engines.folders["target"]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[:2] == ["exits", "read"]


def test_a_request_that_the_host_ended_writes_no_more(tiny_engines, prompts):
    """Three at the start of their answers are aborted; the next one's prompt lies in the pages of one."""
    engine = tiny_engines.load("near")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for prompt in (prompts[2], prompts[1], prompts[6]):
        tokens = engine.generate(prompt, params).token_ids
        old = [engine.make_request([5], LONG, is_streamed=True) for _ in range(3)]
        new = engine.make_request(prompt, params)
        begun = set()

        def abort(piece, request, old=old, begun=begun):
            begun.add(request)
            if len(begun) == 3:
                engine.abort(*old)

        # The new one waits for a slot, and gets one of the three that are freed in the same moment.
        engine.submit([*old, new], lambda request: partial(abort, request=request))
        assert engine.wait_idle(60)
        assert new.token_ids == tokens
