"""What a request for scores has been told of its text; see `Engine.score`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.sampling import Logprobs, SamplingParams


@dataclass(eq=False)
class Scoring:
    """The log-probability of the token after every token of a text of T tokens, as far as it is known.

    The values of a text's last row are of a token that does not exist.

    Attributes:
      report: what is reported.
      layers: the hidden states that are, as in `Size.layers`.
      logprobs: f32[T].
      top_tokens, top: i32 and f32[T, n], the most likely tokens and their log-probabilities.
      hidden: for every layer [T, M]; empty before the first ones come.
      found: for each of the first pages, which other texts have filled, what that text was told. It is known
        once this text's last row is, since programs run in the order of planning.
    """

    report: Logprobs
    layers: tuple[int, ...]
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top: np.ndarray
    hidden: list[np.ndarray] = field(default_factory=list)
    found: list["Scoring"] = field(default_factory=list)

    @classmethod
    def of(cls, num_tokens: int, report: Logprobs, layers: tuple[int, ...], num_top: int) -> "Scoring":
        """Nothing known yet; `num_top` is how many of the most likely tokens a program reports."""
        shape = (num_tokens, num_top)
        values = np.zeros(num_tokens, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        return cls(report, layers, *values)

    @property
    def shares_pages(self) -> bool:
        """Whether pages may be shared with other texts: what was reported of a page is kept with it, except
        for hidden states, which are too large."""
        return not self.layers

    def first_key(self, params: SamplingParams) -> bytes:
        """What the keys of its pages begin with: only texts that are told the same share them."""
        return f"scores {int(self.report)} {params.temperature}".encode("ascii")

    def is_told_as(self, other: "Scoring") -> bool:
        """Whether one program tells both."""
        return (self.report, self.layers) == (other.report, other.layers)

    def take(
        self, start: int, count: int, reported: Sequence[np.ndarray], hidden: Sequence[np.ndarray]
    ) -> None:
        """Takes what was reported of `count` rows from `start` on; further rows are padding.

        Args:
          reported: [C] and [C, n] for `logprobs`, `top_tokens` and `top`.
          hidden: for every layer [C, M].
        """
        rows = slice(start, start + count)
        for values, more in zip((self.logprobs, self.top_tokens, self.top), reported, strict=True):
            values[rows] = more[:count, : values.shape[1]] if values.ndim > 1 else more[:count]
        if hidden and not self.hidden:
            self.hidden = [np.zeros((len(self.logprobs), *each.shape[1:]), each.dtype) for each in hidden]
        for values, more in zip(self.hidden, hidden, strict=True):
            values[rows] = more[:count]

    def finish(self, page_size: int) -> int | None:
        """Copies what was found; returns the first position whose logits are not finite, None if all are."""
        for page, other in enumerate(self.found):
            rows = slice(page * page_size, (page + 1) * page_size)
            self.logprobs[rows] = other.logprobs[rows]
            self.top_tokens[rows], self.top[rows] = other.top_tokens[rows], other.top[rows]
        self.found = []
        wrong = np.flatnonzero(np.isnan(self.logprobs))
        return int(wrong[0]) if len(wrong) else None
