"""Which drafter, and how far it looks ahead."""

from dataclasses import dataclass

from jaxspec.config.errors import ConfigError, at_least

_MOST = 1024
"""Of drafts in a step, and of tokens in an n-gram; each is a row or an operation of the compiled program."""


@dataclass(frozen=True)
class DrafterConfig:
    """Which drafter, and how far it looks ahead.

    Attributes:
      kind: "ngram", "eagle3", "eagle1", "peagle", "dflash", "mtp", "draft_model" or "none".
      num_speculative_tokens: K, drafts per step.
      source, file, sha256: the head's checkpoint; n-gram has none, and "mtp" takes the target's by default.
      sampling: "probabilistic" draws drafts from the head's distribution at the request's temperature
        and verifies against it; "greedy" takes the most likely token and verifies it as one-hot.
      max_ngram, min_ngram: n-gram lengths that prompt lookup tries, the longest first.
    """

    kind: str = "none"
    num_speculative_tokens: int = 4
    source: str | None = None
    file: str | None = None
    sha256: str | None = None
    sampling: str = "probabilistic"
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        kinds = ("ngram", "eagle3", "eagle1", "peagle", "dflash", "mtp", "draft_model", "none")
        if self.kind not in kinds:
            raise ConfigError(f"drafter.kind {self.kind!r} is unknown; known: {', '.join(kinds)}")
        if self.kind != "none":
            at_least("drafter.num_speculative_tokens", self.num_speculative_tokens, 1, _MOST)
        if self.sampling not in ("probabilistic", "greedy"):
            raise ConfigError(f"drafter.sampling must be 'probabilistic' or 'greedy', not {self.sampling!r}")
        if self.kind not in ("none", "ngram", "mtp") and not self.source:
            raise ConfigError(f"drafter.source is missing: {self.kind!r} needs a checkpoint")
        at_least("drafter.min_ngram", self.min_ngram, 1)
        at_least("drafter.max_ngram", self.max_ngram, self.min_ngram, _MOST)
