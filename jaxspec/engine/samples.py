"""Several samples of several prompts: how each is drawn, and which are the best."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, cast

from jaxspec.documents import plain_number
from jaxspec.engine.host.answer import Generation
from jaxspec.errors import OneLineError
from jaxspec.sampling import SamplingParams

Params = SamplingParams | Mapping[str, Any] | None
"""How to sample: `SamplingParams` or a mapping of its fields."""


def params_of_prompts(
    params: Params | Sequence[Params], sampling: Mapping[str, Any], prompts: int | None
) -> tuple[list[SamplingParams], bool]:
    """The parameters of every prompt, and whether each has its own.

    Args:
      params, sampling: as one argument or as keywords; `params` or the keyword `seed` may be a list, with an
        item for each prompt.
      prompts: the number of prompts; None for one that is not in a list.

    Raises:
      ValueError: as `SamplingParams.merge`, or a list is not of the right length.
    """
    seeds: Any = sampling.get("seed")
    seeds = seeds.tolist() if getattr(seeds, "ndim", 0) == 1 else seeds
    if isinstance(params, list | tuple):
        _check_list("params", params, prompts)
        return [SamplingParams.merge(own, sampling) for own in params], True
    one = cast(Params, params)
    if isinstance(seeds, list | tuple):
        _check_list("seed", seeds, prompts)
        return [SamplingParams.merge(one, {**sampling, "seed": seed}) for seed in seeds], True
    return [SamplingParams.merge(one, sampling)] * (1 if prompts is None else prompts), False


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """These parameters, with log-probabilities of the emitted tokens at least."""
    return params if params.logprobs is not None else replace(params, logprobs=0)


def best(samples: Sequence[Generation], count: int) -> list[Generation]:
    """Those with the largest mean log-probability, the best first; unfinished ones are the worst."""

    def rank(sample: Generation) -> tuple[bool, float]:
        return sample.finish_reason not in ("stop", "length"), -sample.mean_logprob

    return sorted(samples, key=rank)[:count]


def check_count(name: str, value: Any, least: int = 1) -> int:
    """The number of samples; `least` if it is None.

    Raises:
      ValueError: it is not an integer, or less than `least`.
    """
    value = least if value is None else plain_number(value)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise OneLineError(f"{name} must be an integer, {least} or more, got {value!r}")
    return int(value)


def _check_list(name: str, items: Sequence[Any], prompts: int | None) -> None:
    if prompts is None:
        raise OneLineError(f"{name}: a list needs a list of prompts")
    if len(items) != prompts:
        raise OneLineError(f"{name}: a list of {len(items)} does not fit {prompts} prompts")
