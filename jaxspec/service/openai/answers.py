"""Answers as bodies of OpenAI's API, whole or piece by piece."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.host.statistics import AcceptanceStats
from jaxspec.files import TextStream, Tokenizer
from jaxspec.service.openai.requests import Asked


@dataclass(frozen=True)
class Head:
    """What the body of an answer and all of its chunks begin with."""

    is_chat: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        """The body with these choices."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before its answers.

    Attributes:
      text: its text.
      token_ids: its tokens.
      logprobs, top_logprobs: of them, as in `Generation`, but None for the first, which nothing is before;
        None if they are not told.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float | None] | None = None
    top_logprobs: Sequence[dict[int, float] | None] | None = None

    def gap(self, tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
        """What stands between it and an answer that begins with these tokens: the space of tokenizers whose
        tokens have none where a text begins."""
        if tokenizer is None or not tokens:
            return ""
        before, after = self.token_ids[-1], tokens[0]
        first, second, both = (tokenizer.decode(each) for each in ([before], [after], [before, after]))
        is_around = both.startswith(first) and both.endswith(second)
        return both[len(first) : len(both) - len(second)] if is_around else ""


def answer_body(
    asked: Asked, answers: Sequence[Sequence[Generation]], echoes: Sequence[Echo] = ()
) -> dict[str, Any]:
    """The body of an answer.

    Args:
      answers: those to each prompt, which have all ended with "stop" or "length".
      echoes: what stands before them, for each prompt; empty for nothing.
    """
    before: Sequence[Echo | None] = echoes or [None] * len(answers)
    made = [(one, echo) for each, echo in zip(answers, before, strict=True) for one in each]
    choices = [_choice(asked, index, *each) for index, each in enumerate(made)]
    return {**Head(asked.is_chat, asked.model).body(choices), **counts(answers)}


def _choice(asked: Asked, index: int, generation: Generation, echo: Echo | None) -> dict[str, Any]:
    told, text = None, generation.text
    if asked.reports_logprobs:
        reporter = Reporter(generation.tokenizer, asked.is_chat)
        before = None if echo is None else reporter.report_prompt(echo)
        told = reporter.report(generation.token_ids, generation.logprobs or [], generation.top_logprobs)
        if before is not None:
            told = {name: None if its is None else its + (told[name] or []) for name, its in before.items()}
    choice = {"index": index, "finish_reason": generation.finish_reason, "logprobs": told}
    if asked.is_chat:
        return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}
    if echo is not None:
        text = echo.text + echo.gap(generation.tokenizer, generation.token_ids) + text
    return {**choice, "text": text}


class Chunks:
    """The bodies of the chunks of one choice."""

    def __init__(
        self, asked: Asked, head: Head, index: int, tokenizer: Tokenizer | None, echo: Echo | None = None
    ):
        self._asked, self._head, self._index, self._tokenizer = asked, head, index, tokenizer
        self._reporter = Reporter(tokenizer, asked.is_chat) if asked.reports_logprobs else None
        self._is_begun = False
        self._echo = echo

    def begin(self) -> Iterator[dict[str, Any]]:
        """The body with the prompt, if it stands before the answer."""
        if self._echo is not None:
            told = None if self._reporter is None else self._reporter.report_prompt(self._echo)
            yield self._body({"text": self._echo.text}, told, None)

    def of(self, piece: Delta) -> Iterator[dict[str, Any]]:
        """The bodies for a piece of its answer: text, if there is any, then the end, if it is the last."""
        told, text = None, piece.text
        if self._echo is not None and piece.token_ids:
            text = self._echo.gap(self._tokenizer, piece.token_ids) + text
            self._echo = None
        if self._reporter is not None and piece.token_ids:
            told = self._reporter.report(piece.token_ids, piece.logprobs, piece.top_logprobs)
        is_first, self._is_begun = not self._is_begun, True
        reason = None if piece.generation is None else piece.generation.finish_reason
        if self._asked.is_chat:
            begin = {"role": "assistant"} if is_first else {}
            if piece.text or told or is_first:
                yield self._body({"delta": {**begin, "content": piece.text}}, told, None)
            if reason:
                yield self._body({"delta": {}}, None, reason)
        elif text or told or reason:
            yield self._body({"text": text}, told, reason)

    def _body(self, content: dict[str, Any], told: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": self._index, **content, "logprobs": told, "finish_reason": reason}
        return self._head.body([choice], is_chunk=True)


def counts(answers: Sequence[Sequence[Generation]]) -> dict[str, Any]:
    """What stands beside the choices of a whole answer, and in the last chunk of a streamed one.

    Args:
      answers: those to each prompt.
    """
    made = [generation for each in answers for generation in each]
    return {
        "usage": usage(answers),
        "metrics": {"speculative_decoding": _speculation(made[0].stats) if len(made) == 1 else None},
    }


def _speculation(stats: AcceptanceStats) -> dict[str, Any] | None:
    """The drafts of one answer, in the words of vLLM that benchmarks such as NVIDIA's AIPerf read; None if no
    step verified any."""
    if not stats.draft_steps:
        return None
    at_least = [stats.draft_steps, *stats.accepted_at, 0]
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / stats.drafted,
        # How many steps accepted 0, 1, 2, … drafts.
        "acceptance_histogram": [count - more for count, more in pairwise(at_least)],
        "num_spec_steps": stats.draft_steps,
        "num_draft_tokens": stats.drafted,
        "num_accepted_draft_tokens": stats.accepted,
        "num_spec_tokens": len(stats.drafted_at),
    }


def usage(answers: Sequence[Sequence[Generation]]) -> dict[str, Any]:
    """The numbers of tokens in prompts and answers, and of drafts. A prompt counts once.

    Args:
      answers: those to each prompt.
    """
    made = [generation for each in answers for generation in each]
    read = sum(len(each[0].prompt_token_ids) for each in answers)
    written = sum(len(generation.token_ids) for generation in made)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(each[0].cached_tokens for each in answers)},
        "completion_tokens_details": {
            "drafted_tokens": sum(generation.stats.drafted for generation in made),
            "accepted_tokens": sum(generation.stats.accepted for generation in made),
        },
    }


class Reporter:
    """Log-probabilities of the tokens of one answer, in the form of either endpoint."""

    def __init__(self, tokenizer: Tokenizer | None, is_chat: bool):
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._offset = 0
        self._stream = None if tokenizer is None else TextStream(tokenizer.backend, skip_special_tokens=False)

    def report_prompt(self, echo: Echo) -> dict[str, Any]:
        """The report of the prompt of a completion, before that of the answer."""
        told = self._report_text(echo.token_ids, echo.logprobs or [], echo.top_logprobs)
        # A token that begins texts is in none.
        spare = self._offset - len(echo.text)
        self._offset = len(echo.text)
        return {**told, "text_offset": [max(at - spare, 0) for at in told["text_offset"]]}

    def report(
        self, tokens: Sequence[int], chosen: Sequence[float] | None, top: Sequence[dict[int, float]] | None
    ) -> dict[str, Any]:
        """The report of the next tokens.

        Args:
          tokens: their ids.
          chosen, top: as in `Generation`.
        """
        assert chosen is not None
        if not self._is_chat:
            return self._report_text(tokens, chosen, top)
        likely = top or [{}] * len(tokens)
        content = [
            {
                **self._entry(token, value),
                "top_logprobs": [self._entry(other, its) for other, its in others.items()],
            }
            for token, value, others in zip(tokens, chosen, likely, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _report_text(
        self,
        tokens: Sequence[int],
        chosen: Sequence[float | None],
        top: Sequence[dict[int, float] | None] | None,
    ) -> dict[str, Any]:
        return {
            "tokens": [self._key(token) for token in tokens],
            "token_logprobs": [None if value is None else _finite(value) for value in chosen],
            "top_logprobs": None if top is None else [*map(self._by_key, tokens, top)],
            "text_offset": [self._begin(token) for token in tokens],
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        content = self._bytes(token)
        return {"token": self._text(token), "logprob": _finite(value), "bytes": list(content)}

    def _bytes(self, token: int) -> bytes:
        return str(token).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def _key(self, token: int) -> str:
        """The token's text; of one that is a part of a character, its bytes as OpenAI writes them."""
        content = self._bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _by_key(self, chosen: int, likely: dict[int, float] | None) -> dict[str, float] | None:
        """The most likely tokens by their texts. Of several with one text, the chosen one has it, else the
        likeliest; the others go by their ids."""
        if likely is None:
            return None
        keys: dict[str, int] = {}
        for token in sorted(likely, key=lambda token: token != chosen):
            keys.setdefault(self._key(token), token)
        texts = {token: text for text, token in keys.items()}
        return {texts.get(token, f"token_id:{token}"): _finite(value) for token, value in likely.items()}

    def _begin(self, token: int) -> int:
        """Where the token's text begins in the answer's, in characters."""
        begin = self._offset
        if self._stream is not None:
            self._offset += len(self._stream.feed([token]))
        return begin


def _finite(value: float) -> float:
    """A log-probability as JSON can have it; of what is impossible, OpenAI's number."""
    return max(value, -9999.0)
