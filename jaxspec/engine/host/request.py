"""A request while it is in the engine."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxspec.engine.host.answer import Delta, FinishReason, Generation
from jaxspec.engine.host.grammars import PlacedGrammar
from jaxspec.engine.host.scoring import Scoring
from jaxspec.engine.host.statistics import AcceptanceStats
from jaxspec.files import TextStream, Tokenizer
from jaxspec.sampling import Asked, SamplingParams
from jaxspec.sampling.grammar_table import MAX_FORCED

Status = Literal["new", "queued", "running", "finished", "aborted", "failed"]
Listener = Callable[[Delta], object]


class Reported(NamedTuple):
    """What a program reports of the tokens that it emitted, by token; empty if it reports nothing.

    Attributes:
      chosen: the log-probability of each.
      top_tokens, top: the most likely tokens in its place, the likeliest first, and their log-probabilities.
    """

    chosen: Sequence[float] = ()
    top_tokens: Sequence[Sequence[int]] = ()
    top: Sequence[Sequence[float]] = ()


NOTHING = Reported()


@dataclass(eq=False)
class Request:
    """A request: new, queued, running, then finished, aborted or failed.

    Made by `Engine.make_request` and run once. The scheduler keeps its slot and pages. Once the request is
    queued, only the engine's thread writes to it.

    Attributes:
      prompt: token ids.
      params: how to sample.
      max_new_tokens: the most tokens of the answer.
      stop_tokens: ids that end the answer.
      seed: the seed of its draws, 0 to 2**64 - 1.
      bad_words: `SamplingParams.bad_words` as tokens.
      grammar: the automaton of its grammar; None if it has none.
      tokenizer: turns ids into text; None if the checkpoint has none.
      num_drafts: the K of this request, whatever the dispatch's; None takes the dispatch's.
      is_streamed: whether `listener` gets every piece of the answer, or only the last one.
      id: a name for it.
      priority: larger values are served first, equal ones in the order of arrival.
      deadline: the `time.monotonic()` at which it is aborted if it has not ended; None for no limit.
      listener: called with every piece, in the engine's thread. If it raises, the request is aborted.
      when_ended: called once with the request, when it has ended, before the listener.
      queue_key: its sort key in the queue, (-priority, number of arrival), which never changes.
      token_ids, text: the answer so far.
      logprobs, top_logprobs: see `Generation`; empty if they were not asked for.
      page_keys: the keys of its first full pages, as far as the scheduler has computed them.
      cached_tokens: tokens of the prompt that were found in the prefix cache; None until reading begins.
      stage: how far it has come while `finish_reason` is None.
      finish_reason: see `Generation`; None until it ends.
      error: see `Generation`.
      verified: see `Generation`.
      weights_version: see `Generation`; None until it gets a slot for the first time.
      asked: what its answer is asked for beyond its tokens.
      scoring: what it is told of its prompt, if it is a request for scores; it has no answer then.
      together: the requests that no update of weights may come between; empty once one of them has begun.
      arrived_at, first_token_at, finished_at: by `time.perf_counter()`; None until then.
    """

    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    seed: int
    tokenizer: Tokenizer | None
    num_drafts: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: PlacedGrammar | None = None
    is_streamed: bool = False
    id: int | str = 0
    priority: int = 0
    deadline: float | None = None
    listener: Listener | None = None
    when_ended: "Callable[[Request], object] | None" = None
    queue_key: tuple[int, int] = (0, 0)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    stage: Literal["new", "queued", "running"] = "new"
    finish_reason: FinishReason | None = None
    error: str | None = None
    verified: list[tuple[int, int]] = field(default_factory=list)
    weights_version: int | None = None
    scoring: Scoring | None = None
    together: Sequence["Request"] = field(default=(), repr=False)
    arrived_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    asked: Asked = field(init=False)
    _num_streamed: int = field(default=0, init=False)
    _num_unstoppable: int = field(default=0, init=False)
    _text_stream: TextStream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.asked = Asked.of(self.params)
        # Only if it is needed: decoding text token by token costs the host more than the rest of a request.
        if self.tokenizer is not None and (self.is_streamed or self.params.stop):
            self._text_stream = TextStream(self.tokenizer.backend)

    @property
    def max_forced(self) -> int:
        """The most tokens without an alternative that a step may verify behind its drafts: none if that could
        change the answer, as draws depend on where steps begin and the number of such rows on the program."""
        is_free = not self.params.temperature or self.num_drafts is None
        return MAX_FORCED if self.grammar is not None and is_free else 0

    @property
    def status(self) -> Status:
        """The request's state: its stage, or how it ended."""
        if self.finish_reason is None:
            return self.stage
        if self.finish_reason == "aborted" or self.finish_reason == "failed":
            return self.finish_reason
        return "finished"

    @property
    def stats(self) -> AcceptanceStats:
        """Counts of its drafts so far."""
        return AcceptanceStats.of(self.verified)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop - 1` of the prompt followed by the answer."""
        size = len(self.prompt)
        return self.prompt[start:stop] + self.token_ids[max(start - size, 0) : max(stop - size, 0)]

    def append(
        self,
        tokens: list[int],
        verified: Sequence[tuple[int, int]] = (),
        reported: Reported = NOTHING,
        *,
        ended: bool,
    ) -> None:
        """Takes new tokens from the device.

        Args:
          tokens: the tokens; those behind the end of a stop string are left out.
          verified: the target passes that emitted them; see `Generation`.
          reported: their log-probabilities, if this request or another one beside it asked for them.
          ended: whether the device ended the request with the last one.
        """
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        num_before, num_new = len(self.token_ids), len(tokens)
        try:
            if self._text_stream is None:
                self.token_ids += tokens
            else:
                self._read(self._text_stream, tokens)
            if ended and self.finish_reason is None:
                is_stopped = self.token_ids[-1] in self.stop_tokens
                self.finish_reason = "stop" if self._finish_text() or is_stopped else "length"
        # A panic in a Rust tokenizer is not an Exception. It fails this request; the others go on.
        except BaseException as error:
            self.finish_reason, self.error = "failed", f"its text cannot be decoded: {error!r}"
        num_taken = len(self.token_ids) - num_before
        self.verified += verified if num_taken == num_new else _passes(verified, num_taken)
        if self.params.logprobs is not None:
            self._report(reported, num_taken)
        self.deliver(num_taken)

    def end_scoring(self, page_size: int) -> None:
        """Ends a request for scores, all of which have been taken."""
        assert self.scoring is not None
        wrong = self.scoring.finish(page_size)
        if wrong is not None:
            self.end("failed", f"the target's logits are NaN or infinite at position {wrong}")
        else:
            self.finish_reason = "length"
            self.deliver()

    def _report(self, reported: Reported, count: int) -> None:
        """Adds the log-probabilities of the first `count` of the reported tokens."""
        self.logprobs += reported.chosen[:count]
        if most := self.params.logprobs:
            for tokens, values in zip(reported.top_tokens[:count], reported.top[:count], strict=True):
                likely = zip(tokens[:most], values[:most], strict=True)
                # Fewer tokens may be possible.
                self.top_logprobs.append({token: value for token, value in likely if value > -math.inf})

    def end(self, reason: Literal["aborted", "failed"], error: str) -> None:
        """Ends the request from outside; does nothing if it has ended."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            with suppress(BaseException):  # as in `append`
                self._finish_text()
            self.deliver()

    def _read(self, text_stream: TextStream, tokens: list[int]) -> None:
        """Adds tokens and their text one by one, up to the end of a stop string."""
        for token in tokens:
            self.token_ids.append(token)
            self.text += text_stream.feed((token,))
            if self._cut_at_stop_string():
                self.finish_reason = "stop"
                return

    def _finish_text(self) -> bool:
        """Adds the text that was held back; returns whether that completed a stop string."""
        if self._text_stream is not None:
            self.text += self._text_stream.finish()
            return self._cut_at_stop_string()
        if self.tokenizer is not None:
            self.text = self.tokenizer.decode(self.token_ids)
        return False

    def _cut_at_stop_string(self) -> bool:
        if len(self.token_ids) <= self.params.min_tokens > 0:
            self._num_unstoppable = len(self.text)
            return False
        found = [
            at
            for stop in self.params.stop
            if (at := self.text.find(stop, max(self._num_unstoppable - len(stop) + 1, 0))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def deliver(self, num_new: int = 0) -> None:
        """Gives the listener the last `num_new` tokens and their text; after the end the answer, once."""
        if self.finish_reason is not None and self.finished_at is None:
            self.finished_at = time.perf_counter()
            if self.when_ended is not None:
                self.when_ended(self)
        if self.listener is None or not (self.is_streamed or self.finish_reason):
            return
        safe = len(self.text) if self.finish_reason else len(self.text) - self._held_back()
        piece = self.text[self._num_streamed : safe]
        self._num_streamed = max(self._num_streamed, safe)
        listener = self.listener
        if self.finish_reason is not None:
            self.listener = None
        try:
            listener(self._piece(piece, num_new))
        except Exception as error:
            self.listener = None
            self.end("aborted", f"its listener raised: {error!r}")

    def _piece(self, text: str, num_new: int) -> Delta:
        start, most = len(self.token_ids) - num_new, self.params.logprobs
        return Delta(
            text,
            self.token_ids[start:],
            self.generation() if self.finish_reason else None,
            None if most is None else self.logprobs[start:],
            self.top_logprobs[start:] if most else None,
        )

    def _held_back(self) -> int:
        """The number of characters at the end of the text that may be the start of a stop string."""
        longest = 0
        for stop in self.params.stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def generation(self) -> Generation:
        """The finished answer."""
        assert self.finish_reason is not None
        return Generation(
            self.text,
            self.token_ids,
            self.finish_reason,
            self.prompt,
            self.stats,
            self.seed,
            self.cached_tokens or 0,
            self.error,
            self.verified,
            self.tokenizer,
            self.weights_version,
            None if self.params.logprobs is None else self.logprobs,
            self.top_logprobs if self.params.logprobs else None,
        )


def _passes(verified: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """The first target passes, as many as it took to emit so many tokens."""
    passes: list[tuple[int, int]] = []
    for drafted, accepted in verified:
        if num_tokens <= 0:
            break
        passes.append((drafted, accepted))
        num_tokens -= accepted + 1
    return passes
