"""An engine for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from jaxspec.engine.engine import Engine
from jaxspec.engine.errors import QueueFullError
from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.prompts import Prompt
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

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generation:
        """Answers one prompt; arguments and errors as in `stream`."""
        generation = None
        async for delta in self.stream(prompt, params, is_streamed=False, **options):
            generation = delta.generation
        assert generation is not None
        return generation

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        is_streamed: bool = True,
        id: int | str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Delta]:
        """Answers one prompt piece by piece; the last piece carries the whole Generation.

        Args:
          params, raw, chat_template_kwargs: as in `Engine.generate`.
          is_streamed, id, priority, deadline: as in `Engine.make_request`.

        Raises:
          QueueFullError: `max_unfinished` requests have not ended; nothing was queued.
          ValueError: something about the prompt or the parameters.
          EngineError: the engine is closed, or its device failed for good.
        """
        if self.num_unfinished >= self.max_unfinished:
            raise QueueFullError(f"{self.num_unfinished} requests are unfinished, and no more are accepted")
        self.num_unfinished += 1
        try:
            # Tokenising a long prompt takes a while and must not block the event loop.
            request = await asyncio.to_thread(
                partial(
                    self.engine.make_request,
                    prompt,
                    SamplingParams.merge(params, sampling),
                    raw=raw,
                    chat_template_kwargs=chat_template_kwargs,
                    is_streamed=is_streamed,
                    id=id,
                    priority=priority,
                    deadline=deadline,
                )
            )
            pieces: asyncio.Queue[Delta] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def hand_over(piece: Delta) -> None:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

            try:
                self.engine.submit([request], lambda request: hand_over)
                is_last = False
                while not is_last:
                    piece = await pieces.get()
                    is_last = piece.generation is not None
                    if piece.generation is not None:
                        self.engine.checked(piece.generation)
                    yield piece
            finally:
                self.engine.abort(request)
        finally:
            self.num_unfinished -= 1

    async def close(self) -> None:
        """Aborts every request, other clients' too, and closes the engine."""
        await asyncio.to_thread(self.engine.close)
