"""Sampling modes: which parts of sampling a decode program contains."""

from enum import IntEnum

from jaxspec_kernels.op import can_branch

from jaxspec.sampling.params import SamplingParams


class SamplingMode(IntEnum):
    """How the slots of a program may sample. A higher mode gives a request the same tokens as a lower one.

    Attributes:
      GREEDY: every temperature is 0; only argmaxes are computed.
      TEMPERATURE: temperature and min-p.
      TRUNCATED: also top-k and top-p, whose thresholds must be searched for.
    """

    GREEDY = 0
    TEMPERATURE = 1
    TRUNCATED = 2


def required_mode(params: SamplingParams) -> SamplingMode:
    """The lowest mode that serves a request."""
    if params.temperature == 0:
        return SamplingMode.GREEDY
    if params.top_k > 0 or params.top_p < 1:
        return SamplingMode.TRUNCATED
    return SamplingMode.TEMPERATURE


def modes_for_sampling() -> tuple[SamplingMode, ...]:
    """The modes to compile a program for, in an engine whose requests may sample."""
    # A program takes seconds to compile. A second one pays only if `TRUNCATED` cannot skip its searches.
    if can_branch():
        return (SamplingMode.TRUNCATED,)
    return (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED)
