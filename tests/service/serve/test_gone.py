"""Clients that go away give their slots and pages back, and crowds lose nothing."""

import asyncio
import random
import threading
import time

import httpx
import pytest
from options import submitted
from tiny_engines import assert_idle

BODY = {"model": "tiny", "prompt": "w6 w7", "temperature": 0, "max_tokens": 100, "ignore_eos": True}


def wait_for(condition):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 30
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_frees_its_slots(server, tiny_engine, slow, stream, n):
    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
            body = {**BODY, "stream": stream, "n": n}
            task = asyncio.ensure_future(http.post("/v1/completions", json=body))
            while sum(request.first_token_at is not None for request in requests) < n:
                await asyncio.sleep(0.01)
            task.cancel()

    with submitted(tiny_engine) as requests:
        asyncio.run(leave())
        wait_for(lambda: server.engine.num_unfinished == 0)
    assert_idle(tiny_engine)
    assert [request.finish_reason for request in requests] == ["aborted"] * n
    assert all(len(request.token_ids) < 100 for request in requests)


def test_a_client_that_goes_while_it_waits_leaves_the_queue(server, tiny_engine, gate):
    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
            gate.clear()
            task = asyncio.ensure_future(http.post("/v1/completions", json=BODY))
            while not requests:
                await asyncio.sleep(0.01)
            task.cancel()

    with submitted(tiny_engine) as requests:
        asyncio.run(leave())
        wait_for(lambda: server.engine.num_unfinished == 0)
        gate.set()
    assert_idle(tiny_engine)
    assert requests[0].finish_reason == "aborted"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_programs_compile_is_not_waited_for(
    server, tiny_engine, monkeypatch, stream
):
    compiling, done = threading.Event(), threading.Event()
    monkeypatch.setattr(
        tiny_engine.core.preparation, "prepare", lambda *asked: compiling.set() or done.wait(60)
    )

    async def leave():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
            body = {**BODY, "stream": stream, "n": 2, "logit_bias": {"9": 1}}
            task = asyncio.ensure_future(http.post("/v1/completions", json=body))
            while not compiling.is_set():
                await asyncio.sleep(0.01)
            assert server.engine.num_unfinished == 2
            task.cancel()

    with submitted(tiny_engine) as requests:
        try:
            asyncio.run(leave())
            wait_for(lambda: server.engine.num_unfinished == 0)
        finally:
            done.set()
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    assert requests == []
    assert_idle(tiny_engine)


def test_half_a_body_is_no_request(server, tiny_engine):
    async def leave():
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"model": '
        )
        await writer.drain()
        writer.close()

    with submitted(tiny_engine) as requests:
        asyncio.run(leave())
        time.sleep(0.1)
    assert requests == []
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_two_hundred_at_once(server, tiny_engine):
    """None is lost, and each has its own answer."""
    prompts = [f"w{6 + i % 50} w{6 + i // 50}" for i in range(200)]
    expected = tiny_engine.generate(prompts, raw=True, max_new_tokens=20, ignore_eos=True)

    async def ask(http, i, prompt):
        body = {**BODY, "prompt": prompt, "max_tokens": 20, "stream": i % 2 == 1}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        if i % 2 == 0:
            return answer.json()["choices"][0]["text"]
        events = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        return "".join(httpx.Response(200, text=e[6:]).json()["choices"][0]["text"] for e in events)

    async def main():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=120, limits=limits, trust_env=False
        ) as http:
            return await asyncio.gather(*(ask(http, i, prompt) for i, prompt in enumerate(prompts)))

    assert asyncio.run(main()) == [answer.text for answer in expected]
    assert_idle(tiny_engine)


def test_fifty_of_a_hundred_clients_are_killed_in_the_middle(server, tiny_engine, slow):
    """The others have their answers, and afterwards nothing is in use."""
    rng = random.Random(0)
    expected = tiny_engine.generate("w6 w7", raw=True, max_new_tokens=30, ignore_eos=True).text

    async def client(i):
        # Without certificates, which each client would read.
        options = {"base_url": server.url, "timeout": 120, "trust_env": False, "verify": False}
        async with httpx.AsyncClient(**options) as http:
            body = {**BODY, "max_tokens": 30, "stream": i % 4 < 2}
            task = asyncio.ensure_future(http.post("/v1/completions", json=body))
            if i % 2:
                await asyncio.sleep(rng.uniform(0, 1.5))
                task.cancel()
                return None
            answer = await task
        return answer.status_code == 200 and (i % 4 < 2 or answer.json()["choices"][0]["text"] == expected)

    async def main():
        return await asyncio.gather(*(client(i) for i in range(100)))

    assert asyncio.run(main()) == [None if i % 2 else True for i in range(100)]
    wait_for(lambda: server.engine.num_unfinished == 0)
    assert_idle(tiny_engine)
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{gauge}{{model_name="tiny"}} 0.0' in metrics
