"""The answer to a request, whole and piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.engine.host.statistics import AcceptanceStats
from jaxspec.files import TextStream, Tokenizer
from jaxspec.lazy import outside

if TYPE_CHECKING:  # optional, and slow to import
    import pandas

FinishReason = Literal["stop", "length", "aborted", "failed"]
TokenSource = Literal["first", "accepted", "recovered", "bonus", "plain"]
"""Where a token of an answer comes from: "first" the pass that read the prompt, "accepted" a draft,
"recovered" the target, in place of a rejected draft, "bonus" the target, after all drafts were accepted,
"plain" a step without drafts."""


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
      text: the answer, without special tokens and without the stop string that ended it; empty if the
        checkpoint has no tokenizer.
      token_ids: every generated token, the end-of-sequence token included.
      finish_reason: "stop" at an end-of-sequence token, a stop token or a stop string; "length" at a limit;
        "aborted" if it was cancelled or its deadline passed; "failed" if it could not go on.
      prompt_token_ids: the prompt, as the model read it.
      stats: counts of its drafts.
      seed: the seed of its draws. The same seed gives the same answer, unless the engine chose K.
      cached_tokens: tokens of the prompt that were found in the prefix cache and not computed.
      error: why it was aborted or failed, in one line; None otherwise.
      verified: for every step that emitted, in order: the drafts verified, and how many were accepted.
      tokenizer: turns ids into text; None if the checkpoint has none.
      weights_version: how often `Engine.update_weights` had replaced the weights that made it; None if it
        ended before it began.
      logprobs: the natural logarithm of every token's probability, given those before it; None if it was not
        asked for. `SamplingParams.logprobs_mode` says of which distribution.
      top_logprobs: for every token, the ids and log-probabilities of the most likely tokens in its place,
        the likeliest first: as many as were asked for, or as can be drawn; None if none were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    stats: AcceptanceStats
    seed: int = 0
    cached_tokens: int = 0
    error: str | None = None
    verified: list[tuple[int, int]] = field(default_factory=list)
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    weights_version: int | None = 0
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the tokenizer when pickled, because it is larger than any answer."""
        return {**vars(self), "tokenizer": None}

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of a token; 0.0 if there is none.

        Raises:
          ValueError: log-probabilities were not asked for.
        """
        if self.logprobs is None:
            raise ValueError("mean_logprob: ask for log-probabilities, with logprobs=0 or more")
        return sum(self.logprobs) / max(len(self.logprobs), 1)

    @property
    def token_sources(self) -> list[TokenSource]:
        """Where each token comes from. Tokens that a step emitted past a stop are not listed."""
        sources: list[TokenSource] = ["first"]
        for drafted, accepted in self.verified:
            own: TokenSource = "plain" if not drafted else "bonus" if accepted == drafted else "recovered"
            sources.extend(["accepted"] * accepted)
            sources.append(own)
        return sources[: len(self.token_ids)]

    @property
    def token_steps(self) -> list[int]:
        """The number of the step that emitted each token, from 1; 0 is the pass that read the prompt."""
        steps = [0]
        for step, (_, accepted) in enumerate(self.verified, 1):
            steps += [step] * (accepted + 1)
        return steps[: len(self.token_ids)]

    @property
    def token_texts(self) -> list[str]:
        """The text that each token adds, special tokens included; its id if there is no tokenizer.

        A character that is split over several tokens belongs to the last one.
        """
        if self.tokenizer is None:
            return [str(token) for token in self.token_ids]
        stream = TextStream(self.tokenizer.backend, skip_special_tokens=False)
        texts = [stream.feed([token]) for token in self.token_ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    def to_dict(self) -> dict[str, Any]:
        """All fields except the tokenizer, ready for JSON; token ids that are keys become text."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_token_ids": self.prompt_token_ids,
            "seed": self.seed,
            "cached_tokens": self.cached_tokens,
            "error": self.error,
            "stats": self.stats.to_dict(),
            "verified": [list(step) for step in self.verified],
            "weights_version": self.weights_version,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs and [_with_text_keys(top) for top in self.top_logprobs],
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each token: its id, its text, where it comes from, and the step that emitted it; further
        its log-probability and those of the most likely tokens, as far as they were asked for.

        Raises:
          ModuleNotFoundError: pandas is not installed.
        """
        columns: dict[str, Sequence[Any]] = {
            "token_id": self.token_ids,
            "text": self.token_texts,
            "source": self.token_sources,
            "step": self.token_steps,
        }
        if self.logprobs is not None:
            columns["logprob"] = self.logprobs
        if self.top_logprobs is not None:
            columns["top_logprobs"] = self.top_logprobs
        return outside("lab.show").frame(columns)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        error = f" · {escape(self.error)}" if self.error else ""
        line = (
            f"{len(self.token_ids)} tokens in {self.stats.steps} steps, {self.stats.acceptance_length:.2f} a "
            f"step with drafts · {escape(self.finish_reason)}{error}"
        )
        return outside("lab.show").answer(line, self.token_texts, self.token_sources, self.token_steps)


def _with_text_keys(top: dict[int, float]) -> dict[str, float]:
    return {str(token): value for token, value in top.items()}


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it streams.

    Attributes:
      text: new text; empty while the answer ends inside a character or may be at the start of a stop string.
      token_ids: new tokens.
      generation: the whole answer; only in the last piece, None before.
      logprobs, top_logprobs: of the new tokens, as in `Generation`.
    """

    text: str
    token_ids: list[int]
    generation: Generation | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
