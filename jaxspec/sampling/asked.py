"""What answers are asked for beyond their tokens, by which programs are chosen: nobody else pays for it."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.sampling.constraints import Constraints, required_constraints
from jaxspec.sampling.logprobs import Logprobs, required_logprobs
from jaxspec.sampling.params import Kind, SamplingParams


class Asked(NamedTuple):
    """What a request asks for.

    Attributes:
      logprobs: the log-probabilities to report.
      constraints: the constraints to apply.
    """

    logprobs: Logprobs = Logprobs.NONE
    constraints: Constraints = Constraints.NONE

    @classmethod
    def of(cls, params: SamplingParams) -> "Asked":
        """What a request with these parameters asks for."""
        return cls(required_logprobs(params), required_constraints(params))

    @classmethod
    def of_kinds(cls, kinds: Iterable[Kind]) -> "Asked":
        """What requests of these kinds ask for together.

        Raises:
          ValueError: a kind is not known.
        """
        wanted = cls()
        for kind in kinds:
            if kind not in _OF_KINDS:
                raise ValueError(f"{kind!r} is none of {', '.join(_OF_KINDS)}")
            wanted = wanted.join(_OF_KINDS[kind])
        return wanted

    def join(self, other: "Asked") -> "Asked":
        """What serves both."""
        return Asked(max(self.logprobs, other.logprobs), self.constraints | other.constraints)


_OF_KINDS: dict[str, Asked] = {
    "logprobs": Asked(logprobs=Logprobs.TOP),
    "json": Asked(constraints=Constraints.GRAMMAR),
    "penalties": Asked(constraints=Constraints.PENALTIES),
    "bias": Asked(constraints=Constraints.TOKENS),
    "words": Asked(constraints=Constraints.SEQUENCES),
}
