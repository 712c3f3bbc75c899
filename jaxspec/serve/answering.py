"""From a body to an answer: requests of an engine, their answers whole or as events."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxspec.engine import AsyncEngine, EngineError, Generation
from jaxspec.engine import Request as EngineRequest
from jaxspec.engine.prompts import Prompt
from jaxspec.engine.samples import best, make_samples
from jaxspec.openai import DEFAULTS, Asked, Chunks, Head, RequestError, answer_body, counts, error_object
from jaxspec.sampling import SamplingParams


class AnswerError(Exception):
    """An answer that did not come to its end."""


@dataclass(frozen=True)
class Answering:
    """What answers bodies.

    Attributes:
      engine: the client of the engine that answers.
      max_prompt: the most tokens of a prompt; None for as many as the engine takes.
      sampling: sampling parameters of bodies that do not set them.
    """

    engine: AsyncEngine
    max_prompt: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)

    def reserve(self, asked: Asked) -> ExitStack:
        """Places for all of the answers, to be closed in the end.

        Raises:
          RequestError: there never are so many.
          QueueFullError: there are not so many now.
        """
        count, most = _num_drawn(asked) * len(asked.prompts), self.engine.max_unfinished
        if count > most:
            field = "n" if asked.n > 1 else "prompt"
            raise RequestError(
                f"{field}: {count} answers are more than this server has places for, {most}", field
            )
        held = ExitStack()
        held.enter_context(self.engine.reserve(count))
        return held

    async def requests(self, asked: Asked) -> list[EngineRequest]:
        """New requests for all answers, prompt by prompt.

        Raises:
          RequestError: the engine refuses the prompt or a parameter.
        """
        # Templates and tokenizers take a while and must not block the event loop.
        return await asyncio.to_thread(self._make, asked)

    def _make(self, asked: Asked) -> list[EngineRequest]:
        params, drawn = asked.params(self.sampling), _num_drawn(asked)
        request = partial(self._request, asked)
        first = partial(request, **asked.prompt_options)
        return make_samples(
            asked.prompts, [params] * len(asked.prompts), drawn, first, request, have_own=False
        )

    def _request(
        self, asked: Asked, prompt: Prompt, params: SamplingParams, **prompt_options: Any
    ) -> EngineRequest:
        engine = self.engine.engine
        try:
            request = engine.make_request(prompt, params, is_streamed=asked.is_streamed, **prompt_options)
        except (ValueError, RecursionError) as error:
            raise asked.error(error) from None
        size = len(request.prompt)
        if self.max_prompt is not None and size > self.max_prompt:
            raise RequestError(
                f"{asked.prompt_field} of {size} tokens: this server takes at most {self.max_prompt}",
                asked.prompt_field,
                code="context_length_exceeded",
            )
        if params.max_new_tokens is None:
            request.max_new_tokens = asked.length(params, engine.room(size))
        return request

    async def whole(self, asked: Asked, requests: Sequence[EngineRequest]) -> dict[str, Any]:
        """The body of the answer.

        Raises:
          AnswerError: one of the answers did not come to its end.
          EngineError: the engine failed or is closed.
        """
        answers: dict[int, Generation] = {}
        async with aclosing(self.engine.follow(requests)) as pieces:
            async for number, piece in pieces:
                if piece.generation is not None:
                    answers[number] = _checked(piece.generation)
        return answer_body(asked, _by_prompt(asked, answers))

    async def events(
        self, asked: Asked, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[Mapping[str, Any] | None]:
        """The events of a streamed answer; None stands for the end. A failure is the last event."""
        head = Head(asked.is_chat, asked.model)
        tokenizer = self.engine.engine.tokenizer
        chunks = [Chunks(asked, head, number, tokenizer) for number in range(len(requests))]
        answers: dict[int, Generation] = {}
        try:
            async with aclosing(self.engine.follow(requests)) as pieces:
                async for number, piece in pieces:
                    if piece.generation is not None:
                        answers[number] = _checked(piece.generation)
                    for body in chunks[number].of(piece):
                        yield body
            if asked.includes_usage:
                yield {**head.body([], is_chunk=True), **counts(_by_prompt(asked, answers))}
            yield None
        except (AnswerError, EngineError) as error:
            yield error_object(str(error), kind="server_error")


def _num_drawn(asked: Asked) -> int:
    """The number of answers that are drawn for each prompt."""
    return asked.best_of or asked.n


def _checked(generation: Generation) -> Generation:
    """The generation, if it has come to its end."""
    if generation.finish_reason in ("aborted", "failed"):
        verb = "was aborted" if generation.finish_reason == "aborted" else "failed"
        raise AnswerError(f"the answer {verb}: {generation.error}")
    return generation


def _by_prompt(asked: Asked, answers: Mapping[int, Generation]) -> list[list[Generation]]:
    """The answers to each prompt, if there are more than wanted, the best of them."""
    each = _num_drawn(asked)
    groups = [[answers[start + i] for i in range(each)] for start in range(0, len(answers), each)]
    return groups if asked.best_of is None else [best(group, asked.n) for group in groups]
