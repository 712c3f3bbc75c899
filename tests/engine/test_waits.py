"""Every call that waits for an engine, and what may end its wait: the engine is closed or fails, Ctrl-C, and
that its client goes."""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from http_server import MODEL
from options import submitted
from tiny_engines import SIZES, assert_idle

import jaxspec
from jaxspec import AsyncEngine, Generation, SamplingParams
from jaxspec.service.serve.app import make_app

LONG = SamplingParams(max_new_tokens=66, ignore_eos=True)
COMPILES = SamplingParams(max_new_tokens=66, ignore_eos=True, logit_bias={3: 1})
"""What needs programs that no other call here needs."""


def run(engine):
    ((_, answer),) = engine.run([engine.make_request([1, 2], LONG)])
    return answer


def stream(engine):
    return list(engine.stream([1, 2], LONG))[-1].generation


async def async_stream(engine):
    return [piece async for piece in AsyncEngine(engine).stream([1, 2], LONG)][-1].generation


async def ask_http(engine, **body):
    transport = httpx.ASGITransport(make_app(AsyncEngine(engine), MODEL))
    async with httpx.AsyncClient(transport=transport, base_url="http://jaxspec") as http:
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 66, "ignore_eos": True, **body}
        answer = await http.post("/v1/completions", json=body, timeout=60)
    return f"{answer.status_code}: {answer.text}"


def update(engine):
    return engine.update_weights(engine.weights)


def update_behind(engine):
    """Waits for its turn behind an update that waits."""
    threading.Thread(target=end_of, args=(lambda: update(engine),), daemon=True).start()
    asyncio.run(until(lambda: engine.core._updates))
    return update(engine)


def wait_idle(engine):
    engine.submit([engine.make_request([1, 2], LONG)], lambda request: lambda piece: None)
    return engine.wait_idle()


SYNC = {
    "generate": lambda engine: engine.generate([1, 2], LONG),
    "sample": lambda engine: engine.sample([1, 2], LONG),
    "score": lambda engine: engine.score([1, 2]),
    "run": run,
    "stream": stream,
    "update": update,
    "update behind": update_behind,
    "wait_idle": wait_idle,
    "wait_prepared": lambda engine: engine.wait_prepared(),
    "compile": lambda engine: engine.generate([1, 2], COMPILES),
    "compile scores": lambda engine: engine.score([1, 2], hidden=1),
}
ASYNC = {
    "async generate": lambda engine: AsyncEngine(engine).generate([1, 2], LONG),
    "async sample": lambda engine: AsyncEngine(engine).sample([1, 2], LONG),
    "async score": lambda engine: AsyncEngine(engine).score([1, 2]),
    "async stream": async_stream,
    "async compile": lambda engine: AsyncEngine(engine).generate([1, 2], COMPILES),
}
ABORTED = ("stream", "async generate", "async stream")
OTHERS = {
    "HTTP": lambda engine: ask_http(engine),
    "HTTP stream": lambda engine: ask_http(engine, stream=True),
    "HTTP compile": lambda engine: ask_http(engine, logit_bias={"3": 1}),
}
CALLS = {
    **SYNC,
    **{
        name: lambda engine, call=call: asyncio.run(call(engine))
        for name, call in [*ASYNC.items(), *OTHERS.items()]
    },
}
WAITS = {
    "update": lambda core: core._updates,
    "update behind": lambda core: core._updates,
    "wait_idle": lambda core: core.when_idle,
    "wait_prepared": lambda core: core.when_prepared,
}
"""What shows that a call waits; of others, that somebody compiles or that a request is queued."""


def waits(name, core):
    if name in WAITS:
        return WAITS[name](core)
    return core.compiling.is_set() if "compile" in name else core.scheduler.waiting


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def stuck(engine):
    """An engine whose rounds do nothing, and whose programs compile until the event is set that it yields."""
    core, programs = engine.core, engine.core.programs
    # So that `sample` and `score` compile nothing.
    engine.generate([1, 2], SamplingParams(max_new_tokens=2, logprobs=0))
    engine.score([1, 2])
    core.compiling, done = threading.Event(), threading.Event()

    def compile_long(sizes, **options):
        core.compiling.set()
        done.wait(60)
        raise InterruptedError  # so that the next test has to wait, too

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "step", lambda: time.sleep(0.002))
        patch.setattr(programs, "compile", compile_long)
        # Nothing is ever prepared.
        programs._left.append(next(iter(programs.compiled)))
        programs.num_uncompiled += 1
        try:
            yield done
        finally:
            done.set()
            if programs._left:
                programs._left.clear()
                programs.num_uncompiled -= 1


@pytest.fixture(scope="module")
def engine(tiny_engines):
    return tiny_engines.load("ngram")


def end_of(call):
    """How a call ended, in words."""
    try:
        result = call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"{result.finish_reason}: {result.error}" if isinstance(result, Generation) else str(result)


@pytest.fixture(scope="module", params=["closed", "failed"])
def ends(request, tiny_engines):
    """What ended an engine, and how every call that waited for it ended then."""
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, **SIZES)
    found = dict.fromkeys(CALLS, "it still waits")

    def call(name):
        found[name] = end_of(lambda: CALLS[name](engine))

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in CALLS]
    with stuck(engine):
        for thread in threads:
            thread.start()
        asyncio.run(until(lambda: all(waits(name, engine.core) for name in CALLS)))
        time.sleep(0.3)  # others may show before a call that it waits
        if request.param == "closed":
            engine.close()
        else:
            engine._thread.put(lambda core: 1 / 0)
        end = time.monotonic() + 10
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
    ended = dict(found)
    engine.close()  # ends those that still wait after a failure
    return request.param, ended


@pytest.mark.parametrize("name", CALLS)
def test_nobody_waits_for_an_engine_that_has_ended(ends, name):
    how, found = ends
    end, why = found[name], {"closed": "the engine was closed", "failed": "the engine failed: Zero"}[how]
    if name.startswith("wait"):
        assert end == str(name == "wait_idle")
    else:
        assert why in end
        kind = {"HTTP": "503: ", "HTTP compile": "503: ", "HTTP stream": "200: "}.get(name, "EngineError: ")
        # What is streamed, or a request of a client that asks for no other, ends as aborted.
        assert end.startswith((kind, *["aborted: "] * (how == "closed" and name in ABORTED)))


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", SYNC)
def test_ctrl_c_ends_a_wait_and_leaves_nothing_behind(engine, name):
    version = engine.weights_version
    before = signal.signal(signal.SIGUSR1, interrupt)

    def press():
        asyncio.run(until(lambda: waits(name, engine.core)))
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    try:
        with stuck(engine), submitted(engine) as requests:
            pressing = threading.Thread(target=press)
            pressing.start()
            with pytest.raises(KeyboardInterrupt):
                SYNC[name](engine)
            pressing.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_idle(engine)
    ends = "length" if name == "wait_idle" else "aborted"
    assert [request.finish_reason for request in requests] == [ends] * len(requests)
    # The one that an update waits behind was not interrupted.
    expected = version + (name == "update behind")
    assert (engine.weights_version, engine.core.scheduler.is_held) == (expected, False)


@pytest.mark.parametrize("name", ["generate", "sample", "score", "run", "stream"])
def test_ctrl_c_as_soon_as_a_request_is_queued_aborts_it(engine, monkeypatch, name):
    put = engine._thread.put

    def put_and_press(command):
        monkeypatch.setattr(engine._thread, "put", put)
        put(command)
        interrupt()

    with stuck(engine), submitted(engine) as requests:
        monkeypatch.setattr(engine._thread, "put", put_and_press)
        with pytest.raises(KeyboardInterrupt):
            SYNC[name](engine)
        asyncio.run(until(lambda: not engine.core.scheduler.waiting))
    assert_idle(engine)
    assert [request.finish_reason for request in requests] == ["aborted"]


@pytest.mark.parametrize("name", ASYNC)
def test_a_task_that_is_cancelled_leaves_nothing_behind(engine, name):
    async def leave():
        task = asyncio.ensure_future(ASYNC[name](engine))
        await until(lambda: waits(name, engine.core))
        task.cancel()
        await asyncio.wait_for(asyncio.wait([task]), 10)
        assert task.cancelled()
        compiled.set()  # the loop's threads end before it does

    with stuck(engine) as compiled, submitted(engine) as requests:
        asyncio.run(leave())
    assert_idle(engine)
    assert [request.finish_reason for request in requests] == ["aborted"] * (name != "async compile")
