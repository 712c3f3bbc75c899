"""Which parts of sampling a decode program has."""

from enum import IntEnum

import jax

from jaxspec.sampling.params import SamplingParams


class SamplingMode(IntEnum):
    """How the slots of a program may sample; a greater mode gives slots of a lesser one the same tokens.

    Attributes:
      GREEDY: every temperature is 0, and only argmaxes are compared.
      TEMPERATURE: temperature and min-p.
      TRUNCATED: top-k and top-p too, whose thresholds are searched for.
    """

    GREEDY = 0
    TEMPERATURE = 1
    TRUNCATED = 2


def required_mode(params: SamplingParams) -> SamplingMode:
    """The least mode that serves a request."""
    if params.temperature == 0:
        return SamplingMode.GREEDY
    if params.top_k > 0 or params.top_p < 1:
        return SamplingMode.TRUNCATED
    return SamplingMode.TEMPERATURE


def modes_for_sampling() -> tuple[SamplingMode, ...]:
    """The modes that are worth a program each, for an engine whose requests may sample."""
    # One more program takes seconds to compile. That pays only where the other cannot skip its searches.
    if can_branch():
        return (SamplingMode.TRUNCATED,)
    return (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED)


def can_branch() -> bool:
    """Whether a program may branch: a GPU's would copy the condition to the host, and cut its CUDA graph."""
    return jax.default_backend() == "cpu"
