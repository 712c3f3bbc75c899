"""Clients of one engine: threads, interrupts, asyncio."""

import asyncio
import random
import signal
import threading
import time

import pytest
from tiny_engines import tokens_of

from jaxspec import AsyncEngine, EngineError, QueueFullError, SamplingParams

ASK = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def engine(tiny_engines):
    return tiny_engines.load("eagle3")


@pytest.fixture
def expected(engine, prompts):
    return tokens_of(engine.generate(prompts, **ASK))


def test_threads_share_an_engine(engine, prompts, expected):
    answers = {}

    def client(number):
        for i in range(3):
            which = (number + i) % len(prompts)
            if number % 2:
                tokens = engine.generate(prompts[which], **ASK).token_ids
            else:
                tokens = [t for piece in engine.stream(prompts[which], **ASK) for t in piece.token_ids]
            answers[number, i] = tokens == expected[which]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 24
    assert all(answers.values())


def interrupts(engine, prompts, expected, *, count, seed):
    """Ctrl-C at random moments of generate, stream and run, beside streams that nobody interrupts.

    Returns how many calls were interrupted.
    """
    rng = random.Random(seed)
    hit = 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.perf_counter()
    engine.generate(prompts, **ASK)
    took = time.perf_counter() - start
    calls = [
        lambda: engine.generate(prompts, **ASK),
        lambda: list(engine.stream(prompts[1], **ASK)),
        lambda: list(engine.run([engine.make_request(p, SamplingParams(**ASK)) for p in prompts])),
    ]
    try:
        for _ in range(count):
            which = rng.randrange(len(prompts))
            neighbour = engine.stream(prompts[which], **ASK)
            pieces = [next(neighbour)]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, took))
                rng.choice(calls)()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hit += 1
            pieces += neighbour
            assert [t for piece in pieces for t in piece.token_ids] == expected[which]
        assert tokens_of(engine.generate(prompts, **ASK)) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return hit


def test_an_interrupt_reaches_its_caller_and_nobody_else(engine, prompts, expected):
    assert interrupts(engine, prompts, expected, count=12, seed=0) >= 3


@pytest.mark.slow
def test_five_hundred_interrupts(engine, prompts, expected):
    assert interrupts(engine, prompts, expected, count=500, seed=1) >= 250


def test_two_hundred_tasks(engine, prompts, expected):
    async def client(async_engine, i):
        which = i % len(prompts)
        if i % 3 == 0:
            generation = await async_engine.generate(prompts[which], **ASK)
            return generation.token_ids == expected[which]
        if i % 3 == 1:
            return [
                token
                async for piece in async_engine.stream(prompts[which], **ASK)
                for token in piece.token_ids
            ] == expected[which]
        task = asyncio.ensure_future(async_engine.generate(prompts[which], **ASK))
        await asyncio.sleep(0.001 * (i % 50))
        task.cancel()
        try:
            return (await task).token_ids == expected[which]
        except asyncio.CancelledError:
            return True

    async def main():
        async_engine = AsyncEngine(engine)
        done = await asyncio.gather(*(client(async_engine, i) for i in range(200)))
        assert async_engine.num_unfinished == 0
        return done

    assert all(asyncio.run(main()))


def test_a_client_that_allows_itself_two_requests_says_when_it_is_full(engine, prompts):
    async def main():
        async_engine = AsyncEngine(engine, max_unfinished=2)
        for call in (async_engine.generate, async_engine.sample):
            with pytest.raises(QueueFullError, match="0 requests are unfinished, and 3 more"):
                await call(prompts[0], n=3, **ASK | {"temperature": 1.0})
        streams = [async_engine.stream(prompts[0], **ASK) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(QueueFullError, match="2 requests are unfinished"):
            await async_engine.generate(prompts[0], **ASK)
        await streams[0].aclose()
        assert len((await async_engine.generate(prompts[0], **ASK)).token_ids) == 24
        await streams[1].aclose()
        with pytest.raises(ValueError, match="prompt is empty"):
            await async_engine.generate([[]])
        assert async_engine.num_unfinished == 0

    asyncio.run(main())


def test_several_requests_are_followed_together(engine, prompts, expected):
    async def main():
        async_engine = AsyncEngine(engine, max_unfinished=len(prompts))
        params = SamplingParams(**ASK)
        requests = [engine.make_request(prompt, params, is_streamed=True) for prompt in prompts]
        tokens = [[] for _ in prompts]
        with async_engine.reserve(len(prompts)):
            with pytest.raises(QueueFullError), async_engine.reserve(1):
                pass
            async for number, piece in async_engine.follow(requests):
                tokens[number] += piece.token_ids
        assert async_engine.num_unfinished == 0
        assert tokens == expected
        with pytest.raises(ValueError, match="has been queued before"):
            await anext(async_engine.follow(requests))

    asyncio.run(main())


def test_a_loop_that_is_gone_takes_its_requests_along(engine, prompts, expected):
    async def leave():
        stream = AsyncEngine(engine).stream(prompts[0], max_new_tokens=60, ignore_eos=True)
        await anext(stream)

    asyncio.run(leave())
    assert engine.wait_idle(60)
    assert tokens_of(engine.generate(prompts, **ASK)) == expected


def test_an_async_engine_closes_what_it_was_given(tiny_engines, prompts):
    import jaxspec

    async def main():
        engine = jaxspec.load(tiny_engines.folders["target"], progress=False, batch_size=2)
        async with AsyncEngine(engine) as async_engine:
            generation = await async_engine.generate(prompts[0], max_new_tokens=3, deadline=100, priority=1)
            assert generation.finish_reason == "length"
        with pytest.raises(EngineError):
            await async_engine.generate(prompts[0])

    asyncio.run(main())
