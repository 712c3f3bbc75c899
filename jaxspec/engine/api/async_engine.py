"""An engine for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Unpack, overload

from jaxspec.engine.api.calls import Call, Result
from jaxspec.engine.api.engine import Engine
from jaxspec.engine.api.prompts import Prompt
from jaxspec.engine.api.samples import Params, Samples, generate_call, sample_call
from jaxspec.engine.api.scores import Scores, score_call
from jaxspec.engine.errors import QueueFullError
from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.host.request import Listener, Request
from jaxspec.engine.rounds.options import (
    AskOptions,
    GenerateOptions,
    RequestOptions,
    SampleOptions,
    ScoreOptions,
    split_options,
)
from jaxspec.sampling import SamplingParams


class AsyncEngine:
    """Streams answers to any number of tasks of one event loop.

        async with AsyncEngine(jaxspec.load("smollm2-135m")) as engine:
            async for delta in engine.stream("Why is the sky blue?", max_new_tokens=64):
                print(delta.text, end="")

    Cancelling a task, or closing its iterator, aborts its request.

    Attributes:
      engine: the engine that serves the requests; other clients may share it.
      max_unfinished: the most requests of this client that may be queued or running at once.
      num_unfinished: how many are.
    """

    def __init__(self, engine: Engine, *, max_unfinished: int = 1024):
        self.engine = engine
        self.max_unfinished = max_unfinished
        self.num_unfinished = 0

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # A string is a sequence of strings, too, and checkers take the first that fits.
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = ..., *, n: None = ..., **options: Unpack[RequestOptions]
    ) -> Generation: ...

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = ..., *, n: int, **options: Unpack[RequestOptions]
    ) -> list[Generation]: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = ...,
        *,
        n: None = ...,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = ...,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> list[list[Generation]]: ...

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        n: int | None = None,
        id: int | str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation | list[Any]:
        """Answers one prompt, or several; with `n`, each of them several times.

        Args:
          prompts, params, raw, chat_template_kwargs, continue_final_message, special_tokens_as_text, n,
            best_of: as in `Engine.generate`.
          id, priority, deadline: as in `Engine.make_request`, for all of them.

        Returns:
          As `Engine.generate`: a Generation for one prompt, or lists.

        Raises:
          QueueFullError: more than `max_unfinished` requests would not have ended; nothing was queued.
          ValueError: something about the prompts or the parameters.
          EngineError: the engine is closed, or its device failed for good.
        """
        make = partial(self.engine.make_request, id=id, priority=priority, deadline=deadline)
        return await self._answer(lambda: generate_call(make, prompts, params, n=n, **options))

    async def sample(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        **options: Unpack[SampleOptions],
    ) -> Samples:
        """Draws samples as arrays; arguments and errors as in `Engine.sample`.

        Raises:
          QueueFullError: more than `max_unfinished` requests would not have ended; nothing was queued.
        """
        return await self._answer(lambda: sample_call(self.engine, prompts, params, **options))

    async def score(self, sequences: Prompt | Sequence[Prompt], **options: Unpack[ScoreOptions]) -> Scores:
        """The log-probability of every token of some sequences; arguments and errors as in `Engine.score`.

        Raises:
          QueueFullError: more than `max_unfinished` requests would not have ended; nothing was queued.
        """
        return await self._answer(lambda: score_call(self.engine, sequences, **options))

    async def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        is_streamed: bool = True,
        id: int | str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **options: Unpack[AskOptions],
    ) -> AsyncIterator[Delta]:
        """Answers one prompt piece by piece; the last piece carries the whole Generation.

        Args:
          params, raw, chat_template_kwargs, continue_final_message, special_tokens_as_text: as in
            `Engine.generate`.
          is_streamed, id, priority, deadline: as in `Engine.make_request`.

        Raises:
          QueueFullError: `max_unfinished` requests have not ended; nothing was queued.
          ValueError: something about the prompt or the parameters.
          EngineError: the engine is closed, or its device failed for good.
        """
        how, sampling = split_options(options)
        with self.reserve(1):
            # Tokenising a long prompt takes a while and must not block the event loop.
            request = await asyncio.to_thread(
                partial(
                    self.engine.make_request,
                    prompt,
                    SamplingParams.merge(params, sampling),
                    is_streamed=is_streamed,
                    id=id,
                    priority=priority,
                    deadline=deadline,
                    **how,
                )
            )
            async with aclosing(self.follow([request])) as pieces:
                async for _, piece in pieces:
                    yield piece

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Counts so many requests as unfinished inside the context, for `follow`.

        Raises:
          QueueFullError: there would be more than `max_unfinished`.
        """
        if self.num_unfinished + count > self.max_unfinished:
            raise QueueFullError(
                f"{self.num_unfinished} requests are unfinished, and {count} more are not accepted"
            )
        self.num_unfinished += count
        try:
            yield
        finally:
            self.num_unfinished -= count

    async def follow(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta]]:
        """Runs requests from `Engine.make_request`, whose places the caller has reserved.

        Yields the pieces of their answers as they come, each with the number of its request, until all have
        ended. Closing the iterator aborts those that have not.

        Raises:
          ValueError: a request has been queued before.
          EngineError: the engine is closed, or its device failed for good.
        """
        pieces: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        numbers = {request: number for number, request in enumerate(requests)}

        def listener(request: Request) -> Listener:
            number = numbers[request]
            return lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

        try:
            self.engine.submit(requests, listener)
            num_left = len(requests)
            while num_left:
                number, piece = await pieces.get()
                if piece.generation is not None:
                    num_left -= 1
                    self.engine.checked(piece.generation)
                yield number, piece
        finally:
            self.engine.abort(*requests)

    async def _answer(self, make_call: Callable[[], Call[Result]]) -> Result:
        """Makes a call's requests, queues them at once and waits for their ends; returns its result."""
        call = await asyncio.to_thread(make_call)
        with self.reserve(len(call.requests)):
            async with aclosing(self.follow(call.requests)) as pieces:
                async for _ in pieces:
                    pass
        return await asyncio.to_thread(call.finish, [request.generation() for request in call.requests])

    async def close(self) -> None:
        """Aborts every request, other clients' too, and closes the engine."""
        # In a thread of its own, since those of the event loop's pool may all be waiting for this.
        with ThreadPoolExecutor(1, "jaxspec-close") as own:
            await asyncio.get_running_loop().run_in_executor(own, self.engine.close)
