"""A request on its way through the engine, and the generation it ends as."""

from dataclasses import dataclass, field
from typing import Literal

from jaxspec.checkpoints import TextStream, Tokenizer
from jaxspec.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass
class AcceptanceStats:
    """What verification did to the drafts of one request, or of many together.

    Attributes:
      steps: target passes after prefill.
      draft_steps: those of them that had drafts to verify; the rates below are over these.
      drafted: drafts verified.
      accepted: drafts that the target accepted.
      accepted_at: how often the draft at each position was accepted.
    """

    steps: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add_step(self, drafted: int, accepted: int) -> None:
        """Counts one target pass."""
        self.steps += 1
        if not drafted:
            return
        self.draft_steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1

    def add(self, other: "AcceptanceStats") -> None:
        """Adds another request's counts."""
        self.steps += other.steps
        self.draft_steps += other.draft_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for i, count in enumerate(other.accepted_at):
            self.accepted_at[i] += count

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step that had drafts, the target's own token included; 1.0 without drafts."""
        return 1.0 + self.accepted / self.draft_steps if self.draft_steps else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Probability that the drafts up to and including each position were all accepted."""
        return [count / self.draft_steps for count in self.accepted_at]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Probability that each draft was accepted, given that the ones before it were."""
        reached = [self.draft_steps, *self.accepted_at]
        return [
            count / before if before else 0.0
            for before, count in zip(reached, self.accepted_at, strict=False)
        ]

    def as_dict(self) -> dict:
        """Counts and rates, ready for JSON."""
        return {
            "steps": self.steps,
            "draft_steps": self.draft_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position,
            "conditional_acceptance": self.conditional_acceptance,
        }


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
      text: the answer, without special tokens and without the stop string that ended it; empty where
        the checkpoint has no tokenizer.
      token_ids: every generated token, the end-of-sequence token included.
      finish_reason: "stop" for an end-of-sequence token, a stop token or a stop string, "length" for
        a limit.
      prompt_token_ids: what the model read.
      stats: what became of the drafts.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    stats: AcceptanceStats


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it streams.

    Attributes:
      text: new text; empty while the tokens so far end inside a character, or might begin a stop string.
      token_ids: new tokens.
      generation: the whole answer, with the last piece only.
    """

    text: str
    token_ids: list[int]
    generation: Generation | None = None


@dataclass(eq=False)
class Request:
    """A request in the engine. Its slot and pages are the scheduler's business.

    Attributes:
      prompt: token ids.
      params: how to sample.
      max_new_tokens: `params.max_new_tokens`, cut to what the model's length leaves.
      stop_tokens: ids that end the answer.
      seed: two 32-bit words.
      tokenizer: turns ids into text; None where the checkpoint has none.
      is_streamed: whether somebody takes `deltas`, a piece for every block of tokens.
    """

    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    seed: tuple[int, int]
    tokenizer: Tokenizer | None
    is_streamed: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    deltas: list[Delta] = field(default_factory=list)
    num_streamed: int = 0
    _text_stream: TextStream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Text token by token costs the host more than the rest of a request: only where it is looked at.
        if self.tokenizer is not None and (self.is_streamed or self.params.stop):
            self._text_stream = TextStream(self.tokenizer)

    def append(self, tokens: list[int], *, ended: bool) -> None:
        """Takes new tokens from the device; `ended` if the device ended the request with the last one."""
        if self._text_stream is None:
            self.token_ids += tokens
        else:
            tokens = self._read(self._text_stream, tokens)
        if ended and self.finish_reason is None:
            self._end()
        if self.is_streamed:
            self._emit(tokens)

    def _read(self, text_stream: TextStream, tokens: list[int]) -> list[int]:
        """Takes tokens one by one with their text; returns those up to a stop string's end."""
        for taken, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            self.text += text_stream.feed((token,))
            if self._cut_at_stop_string():
                return tokens[:taken]
        return tokens

    def _end(self) -> None:
        self.finish_reason = "stop" if self.token_ids[-1] in self.stop_tokens else "length"
        if self._text_stream is not None:
            self.text += self._text_stream.finish()
            self._cut_at_stop_string()
        elif self.tokenizer is not None:
            self.text = self.tokenizer.decode(self.token_ids)

    def _cut_at_stop_string(self) -> bool:
        found = [at for at in map(self.text.find, self.params.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"
        return bool(found)

    def _emit(self, tokens: list[int]) -> None:
        safe = len(self.text) if self.finish_reason else len(self.text) - self._held_back()
        piece = self.text[self.num_streamed : safe]
        self.num_streamed = max(self.num_streamed, safe)
        self.deltas.append(Delta(piece, tokens, self.generation() if self.finish_reason else None))

    def _held_back(self) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
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
        return Generation(self.text, self.token_ids, self.finish_reason, self.prompt, self.stats)
