"""Statistics of drafts: how many were verified and accepted, at which positions, and how sure that is."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

from jaxspec.lazy import outside

if TYPE_CHECKING:  # optional, and slow to import
    import pandas

Interval = tuple[float, float]
"""The ends of a 95 % confidence interval."""

_Z = 1.96
"""Standard errors from the middle of a 95 % interval to its ends."""


class HasStats(Protocol):
    """An answer, as far as its statistics go."""

    @property
    def stats(self) -> "AcceptanceStats": ...


@dataclass(repr=False)
class AcceptanceStats:
    """How many drafts of one request, or of several together, were verified and accepted.

    The number of drafts may differ from step to step, so every position has counts of its own.

    Attributes:
      steps: target passes after prefill.
      draft_steps: those of them that verified drafts.
      drafted: drafts verified.
      accepted: drafts that the target accepted.
      accepted_at: how often the draft at each position, from 0, was accepted.
      drafted_at: how many steps had a draft at each position.
      reached_at: how many of those accepted all drafts before it.
    """

    steps: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, verified: Iterable[tuple[int, int]]) -> "AcceptanceStats":
        """The counts of target passes: how many drafts each verified and accepted."""
        stats = cls()
        for (drafted, accepted), times in Counter(verified).items():
            stats.add_step(drafted, accepted, times)
        return stats

    @classmethod
    def total(cls, parts: "Iterable[HasStats | AcceptanceStats]") -> "AcceptanceStats":
        """The counts of several answers, or statistics, together."""
        total = cls()
        for part in parts:
            total.add(part if isinstance(part, AcceptanceStats) else part.stats)
        return total

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AcceptanceStats":
        """The inverse of `to_dict`."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def add_step(self, drafted: int, accepted: int, times: int = 1) -> None:
        """Counts a target pass, or several like it."""
        self.steps += times
        if not drafted:
            return
        self.draft_steps += times
        self.drafted += drafted * times
        self.accepted += accepted * times
        for counts, number in (
            (self.accepted_at, accepted),
            (self.drafted_at, drafted),
            (self.reached_at, min(accepted + 1, drafted)),
        ):
            counts += [0] * (drafted - len(counts))
            counts[:number] = [count + times for count in counts[:number]]

    def add(self, other: "AcceptanceStats") -> None:
        """Adds another request's counts."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, [a + b for a, b in zip_longest(own, value, fillvalue=0)])
            else:
                setattr(self, name, own + value)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step that verified drafts, the target's own token included; 1.0 if none did."""
        return 1.0 + self.accepted / self.draft_steps if self.draft_steps else 1.0

    @property
    def length_interval(self) -> Interval:
        """The 95 % interval of `acceptance_length`, as if steps were independent; (1.0, inf) without two."""
        if self.draft_steps < 2:
            return 1.0, float("inf")
        mean = self.accepted / self.draft_steps
        # The share of steps that accepted more than i drafts is accepted_at[i] / draft_steps.
        squares = sum((2 * i + 1) * count for i, count in enumerate(self.accepted_at)) / self.draft_steps
        half = _Z * sqrt(max(squares - mean**2, 0.0) / (self.draft_steps - 1))
        return max(1.0, 1.0 + mean - half), 1.0 + mean + half

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the steps with a draft at each position, the share that accepted all drafts up to it."""
        return [count / of for count, of in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each position, how often its draft was accepted where all drafts before it were."""
        return [
            count / of if of else 0.0 for count, of in zip(self.accepted_at, self.reached_at, strict=True)
        ]

    def intervals(self, *, conditional: bool = False) -> list[Interval]:
        """The 95 % interval of each `acceptance_per_position`, as if steps were independent.

        Args:
          conditional: the intervals of `conditional_acceptance` instead.
        """
        numbers = self.reached_at if conditional else self.drafted_at
        return [wilson(count, of) for count, of in zip(self.accepted_at, numbers, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, ready for JSON."""
        return {
            **{name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()},
            "acceptance_length": self.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position,
            "conditional_acceptance": self.conditional_acceptance,
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each draft position: the three counts, and the two rates.

        Raises:
          ModuleNotFoundError: pandas is not installed.
        """
        names = (
            "accepted_at",
            "drafted_at",
            "reached_at",
            "acceptance_per_position",
            "conditional_acceptance",
        )
        frame = outside("lab.show").frame({name: getattr(self, name) for name in names})
        frame.index.name = "position"
        return frame

    def __repr__(self) -> str:
        return (
            f"<AcceptanceStats: {self.acceptance_length:.2f} tokens a step, {self.accepted} of "
            f"{self.drafted} drafts accepted in {self.steps} steps>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        line = (
            f"<b>{self.acceptance_length:.2f} tokens a step</b> · {self.steps} steps, "
            f"{self.draft_steps} with drafts · {self.accepted} of {self.drafted} drafts accepted"
        )
        return outside("lab.show").rates(line, self.acceptance_per_position, self.conditional_acceptance)


def wilson(count: int, of: int) -> Interval:
    """The 95 % interval of a share, by E. B. Wilson (1927); (0, 1) if it is a share of nothing."""
    if not of:
        return 0.0, 1.0
    share, z = count / of, _Z**2 / of
    middle = (share + z / 2) / (1 + z)
    half = _Z * sqrt(share * (1 - share) / of + z / (4 * of)) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)
