"""What answers are asked for beyond their tokens, by which programs are chosen: nobody else pays for it."""

from typing import NamedTuple

from jaxspec.sampling.constraints import Constraints, required_constraints
from jaxspec.sampling.logprobs import Logprobs, required_logprobs
from jaxspec.sampling.params import SamplingParams


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

    def join(self, other: "Asked") -> "Asked":
        """What serves both."""
        return Asked(max(self.logprobs, other.logprobs), self.constraints | other.constraints)
