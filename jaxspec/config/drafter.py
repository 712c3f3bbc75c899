"""The drafter of a configuration: its kind, checkpoint and number of drafts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol

from jaxspec.config.errors import ConfigError, at_least, use_plain_values
from jaxspec.errors import page
from jaxspec.registry import Registry
from jaxspec.spelling import known_names

MAX_DRAFTS = 64
"""Limit of drafts per step, and of tokens in an n-gram.

Every draft is a row of the target's pass in every slot, with logits over the vocabulary, which sampling holds
several times; every token of an n-gram is an operation over all histories. Programs for 1000 drafts took ten
minutes and 7 GB to compile. The largest blocks of public heads have 64 tokens.
"""


class DrafterKind(Protocol):
    """What a configuration must know about a kind of drafter.

    Attributes:
      weights_from: "own": `drafter.source` must name a checkpoint; "target": the target's checkpoint, unless
        `drafter.source` names one; "none": no checkpoint.
      reads: the further keys of `[drafter]` that it reads, of `max_ngram`, `min_ngram`, `draft_vocab_size`,
        `dtype` and `options`.
    """

    weights_from: ClassVar[Literal["own", "target", "none"]]
    reads: ClassVar[tuple[str, ...]]


DRAFTERS = Registry("jaxspec.drafters")
"""Every kind of drafter by name; `jaxspec.register_drafter` fills it."""


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter, and how many tokens it drafts.

    Attributes:
      kind: "none", for plain decoding, or another name in `DRAFTERS`.
      num_speculative_tokens: K, drafts per step, at most 64; "auto" chooses K for every dispatch to
        maximise tokens per second.
      max_speculative_tokens: the largest K under "auto".
      source, file, sha256: the drafter's checkpoint, as in `SourceConfig`; not every kind needs one.
      sampling: "probabilistic" draws drafts from the drafter's distribution at the request's temperature
        and verifies against it; "greedy" drafts the most likely token and verifies it as one-hot.
      max_ngram, min_ngram: n-gram lengths that prompt lookup tries, at most 64, the longest first.
      draft_vocab_size: a head drafts only the most frequent tokens of its vocabulary, at most this many.
        Drafts are then cheaper, and fewer are accepted. None keeps all. The head's checkpoint must say which
        tokens are frequent (`draft_order`), as those that jaxspec trains do.
      dtype: "float8_e4m3fn" or "int4" rounds the matrices of a head, as `jaxspec convert --quantize` does, so
        that drafting reads fewer bytes on a GPU; fewer drafts may be accepted. None keeps them as they are.
      options: settings of a drafter registered from outside, which reads them itself.
    """

    kind: str = "none"
    num_speculative_tokens: int | str = 4
    source: str | None = None
    file: str | None = None
    sha256: str | None = None
    sampling: str = "probabilistic"
    max_ngram: int = 3
    min_ngram: int = 1
    options: dict = field(default_factory=dict)
    max_speculative_tokens: int = 4
    draft_vocab_size: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        use_plain_values(self)
        if self.kind not in DRAFTERS:
            raise ConfigError(
                f"drafter.kind {self.kind!r} is unknown; {known_names(self.kind, DRAFTERS)}; "
                f"your own: {page('writing-a-drafter.md')}"
            )
        if self.kind != "none":
            if isinstance(self.num_speculative_tokens, str) and self.num_speculative_tokens != "auto":
                raise ConfigError(
                    "drafter.num_speculative_tokens must be a whole number or 'auto', "
                    f"not {self.num_speculative_tokens!r}"
                )
            if not self.is_adaptive:
                at_least("drafter.num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
            at_least("drafter.max_speculative_tokens", self.max_speculative_tokens, 1, MAX_DRAFTS)
        if self.sampling not in ("probabilistic", "greedy"):
            raise ConfigError(f"drafter.sampling must be 'probabilistic' or 'greedy', not {self.sampling!r}")
        if self.weights_from == "own" and not self.source:
            raise ConfigError(f"drafter.source is missing: {self.kind!r} needs a checkpoint")
        if self.draft_vocab_size is not None:
            at_least("drafter.draft_vocab_size", self.draft_vocab_size, 1)
        if self.dtype not in (None, "float8_e4m3fn", "int4"):
            raise ConfigError(f"drafter.dtype must be 'float8_e4m3fn' or 'int4', not {self.dtype!r}")
        at_least("drafter.min_ngram", self.min_ngram, 1)
        at_least("drafter.max_ngram", self.max_ngram, self.min_ngram, MAX_DRAFTS)

    def check_effect(self, keys: Iterable[str]) -> None:
        """Checks that every one of these keys, which were set for this drafter, has an effect on it.

        Raises:
          ConfigError: one has none.
        """
        used = {"kind"}
        if self.kind != "none":
            used |= {"num_speculative_tokens", "sampling", *DRAFTERS[self.kind].reads}
            used |= {"max_speculative_tokens"} if self.is_adaptive else set()
            used |= {"source", "file", "sha256"} if self.weights_from != "none" else set()
        defaults = {each.name: each.default for each in fields(self)}
        for name in keys:
            value = getattr(self, name)
            is_set = name == "num_speculative_tokens" or value not in (None, {}, defaults[name])
            if is_set and name not in used:
                why = f"kind {self.kind!r}"
                if name == "max_speculative_tokens" and self.kind != "none":
                    why = f"num_speculative_tokens {self.num_speculative_tokens}, only with 'auto'"
                raise ConfigError(f"drafter.{name} has no effect with {why}")

    @property
    def is_adaptive(self) -> bool:
        """Whether K is chosen anew for every dispatch."""
        return self.num_speculative_tokens == "auto"

    @property
    def num_drafts(self) -> int:
        """K, or its maximum under "auto"; 0 without a drafter."""
        if self.kind == "none":
            return 0
        return self.max_speculative_tokens if self.is_adaptive else int(self.num_speculative_tokens)

    @property
    def weights_from(self) -> str:
        """See `DrafterKind`."""
        return DRAFTERS[self.kind].weights_from

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments that every drafter's constructor takes."""
        return {
            "num_speculative_tokens": self.num_drafts,
            "probabilistic": self.sampling == "probabilistic",
        }
