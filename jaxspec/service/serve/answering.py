"""From a body to an answer: requests of an engine, their answers whole or as events."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxspec.engine import AsyncEngine, Delta, EngineError, Generation
from jaxspec.engine import Request as EngineRequest
from jaxspec.engine.api.calls import Call
from jaxspec.engine.api.prompts import Prompt, encode_prompt
from jaxspec.engine.api.samples import best, make_samples
from jaxspec.engine.api.scores import Scores, score_call
from jaxspec.files import Tokenizer
from jaxspec.sampling import SamplingParams
from jaxspec.service.openai import (
    DEFAULTS,
    Asked,
    Chunks,
    Echo,
    Head,
    RequestError,
    answer_body,
    counts,
    error_object,
)


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
        each = (0 if asked.only_reads else _num_drawn(asked)) + asked.scores_prompts
        count, most = each * len(asked.prompts), self.engine.max_unfinished
        if count > most:
            field = "n" if asked.n > 1 else "prompt"
            raise RequestError(
                f"{field}: {count} answers are more than this server has places for, {most}", field
            )
        held = ExitStack()
        held.enter_context(self.engine.reserve(count))
        return held

    async def requests(self, asked: Asked) -> "Requests":
        """New requests for all answers, prompt by prompt.

        Raises:
          RequestError: the engine refuses the prompt or a parameter.
        """
        # Templates and tokenizers take a while and must not block the event loop.
        return await asyncio.to_thread(self._make, asked)

    def _make(self, asked: Asked) -> "Requests":
        params, drawn = asked.params(self.sampling), _num_drawn(asked)
        if asked.only_reads:
            prompts = [self._read(asked, prompt) for prompt in asked.prompts]
            return Requests([], prompts, self._scores(asked, params, prompts))
        request = partial(self._request, asked)
        first = partial(request, **asked.prompt_options)
        answers = make_samples(
            asked.prompts, [params] * len(asked.prompts), drawn, first, request, have_own=False
        )
        prompts = [each.prompt for each in answers[::drawn]]
        return Requests(answers, prompts, self._scores(asked, params, prompts))

    def _read(self, asked: Asked, prompt: Prompt) -> list[int]:
        """The tokens of a prompt that nothing answers."""
        engine = self.engine.engine
        try:
            ids = encode_prompt(
                prompt,
                engine.tokenizer,
                vocab_size=engine.vocab_size,
                max_tokens=engine.max_model_len,
                **asked.prompt_options,
            )
        except (ValueError, RecursionError) as error:
            raise asked.error(error) from None
        self._check_size(asked, len(ids))
        return ids

    def _scores(
        self, asked: Asked, params: SamplingParams, prompts: Sequence[list[int]]
    ) -> Call[Scores] | None:
        """What tells the log-probabilities of prompts; None if nobody asks."""
        if not asked.scores_prompts:
            return None
        try:
            return score_call(self.engine.engine, prompts, top=params.logprobs or 0)
        except ValueError as error:
            raise asked.error(error) from None

    def _check_size(self, asked: Asked, size: int) -> None:
        if self.max_prompt is not None and size > self.max_prompt:
            raise RequestError(
                f"{asked.prompt_field} of {size} tokens: this server takes at most {self.max_prompt}",
                asked.prompt_field,
                code="context_length_exceeded",
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
        self._check_size(asked, size)
        if params.max_new_tokens is None:
            request.max_new_tokens = asked.length(params, engine.room(size))
        return request

    async def whole(self, asked: Asked, requests: "Requests") -> dict[str, Any]:
        """The body of the answer.

        Raises:
          AnswerError: one of the answers did not come to its end.
          EngineError: the engine failed or is closed.
        """
        scoring = requests.scoring
        ended = await self._ended([*scoring, *requests.answers])
        echoes = self._echoes(asked, requests, ended[: len(scoring)])
        if asked.only_reads:
            tokenizer = self.engine.engine.tokenizer
            answers = [[replace(each, tokenizer=tokenizer)] * asked.n for each in ended]
        else:
            answers = _by_prompt(asked, ended[len(scoring) :])
        return answer_body(asked, answers, echoes)

    async def events(self, asked: Asked, requests: "Requests") -> AsyncGenerator[Mapping[str, Any] | None]:
        """The events of a streamed answer; None stands for the end. A failure is the last event."""
        head = Head(asked.is_chat, asked.model)
        tokenizer = self.engine.engine.tokenizer
        answers: dict[int, Generation] = {}
        try:
            scored = await self._ended(requests.scoring)
            echoes = self._echoes(asked, requests, scored)
            each = _num_drawn(asked)
            chunks = [
                Chunks(asked, head, number, tokenizer, echoes[number // each] if echoes else None)
                for number in range(each * len(asked.prompts))
            ]
            for choice in chunks:
                for body in choice.begin():
                    yield body
            async with aclosing(self._pieces(asked, requests, scored)) as pieces:
                async for number, piece in pieces:
                    if piece.generation is not None:
                        answers[number] = _checked(piece.generation)
                    for body in chunks[number].of(piece):
                        yield body
            if asked.includes_usage:
                made = [answers[number] for number in sorted(answers)]
                yield {**head.body([], is_chunk=True), **counts(_grouped(made, each))}
            yield None
        except (AnswerError, EngineError) as error:
            yield error_object(str(error), kind="server_error")

    async def _pieces(
        self, asked: Asked, requests: "Requests", scored: Sequence[Generation]
    ) -> AsyncGenerator[tuple[int, Delta]]:
        """The pieces of all answers, each with the number of its choice."""
        if asked.only_reads:
            for number in range(asked.n * len(scored)):
                yield number, Delta("", [], scored[number // asked.n])
            return
        async with aclosing(self.engine.follow(requests.answers)) as pieces:
            async for each in pieces:
                yield each

    async def _ended(self, requests: Sequence[EngineRequest]) -> list[Generation]:
        """What became of requests, all of which came to their end."""
        found: dict[int, Generation] = {}
        async with aclosing(self.engine.follow(requests)) as pieces:
            async for number, piece in pieces:
                if piece.generation is not None:
                    found[number] = _checked(piece.generation)
        return [found[number] for number in range(len(requests))]

    def _echoes(self, asked: Asked, requests: "Requests", scored: Sequence[Generation]) -> list[Echo]:
        """What stands before the answers to each prompt."""
        if not asked.echoes:
            return []
        scores = requests.scores.finish(scored) if requests.scores and asked.reports_logprobs else None
        return [
            _echo(prompt, ids, scores, number, self.engine.engine.tokenizer)
            for number, (prompt, ids) in enumerate(zip(asked.prompts, requests.prompts, strict=True))
        ]


@dataclass(frozen=True)
class Requests:
    """What the engine is asked for one body.

    Attributes:
      answers: requests for all answers, prompt by prompt; empty if the prompts are only read.
      prompts: the tokens of each prompt.
      scores: what tells the log-probabilities of the prompts; None if nobody asks.
    """

    answers: list[EngineRequest]
    prompts: list[list[int]]
    scores: Call[Scores] | None = None

    @property
    def scoring(self) -> list[EngineRequest]:
        """The requests of `scores`, one for each prompt."""
        return [] if self.scores is None else self.scores.requests


def _echo(
    prompt: Prompt, ids: list[int], scores: Scores | None, number: int, tokenizer: Tokenizer | None
) -> Echo:
    """The prompt of this number, with its log-probabilities, if they are known."""
    decoded = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    text = prompt if isinstance(prompt, str) else decoded
    if scores is None:
        return Echo(text, ids)
    size = len(ids)
    chosen = [None, *scores.logprobs[number, 1:size].tolist()]
    if not scores.top_tokens.shape[-1]:
        return Echo(text, ids, chosen)
    tops = scores.top_tokens[number, 1:size].tolist(), scores.top_logprobs[number, 1:size].tolist()
    return Echo(text, ids, chosen, [None, *(dict(zip(*top, strict=True)) for top in zip(*tops, strict=True))])


def _num_drawn(asked: Asked) -> int:
    """The number of answers that are drawn for each prompt."""
    return asked.best_of or asked.n


def _checked(generation: Generation) -> Generation:
    """The generation, if it has come to its end."""
    if generation.finish_reason in ("aborted", "failed"):
        verb = "was aborted" if generation.finish_reason == "aborted" else "failed"
        raise AnswerError(f"the answer {verb}: {generation.error}")
    return generation


def _by_prompt(asked: Asked, ended: Sequence[Generation]) -> list[list[Generation]]:
    """The answers to each prompt, if there are more than wanted, the best of them."""
    groups = _grouped(ended, _num_drawn(asked))
    return groups if asked.best_of is None else [best(group, asked.n) for group in groups]


def _grouped(ended: Sequence[Generation], each: int) -> list[list[Generation]]:
    return [list(ended[start : start + each]) for start in range(0, len(ended), each)]
