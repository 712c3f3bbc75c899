"""Several samples of several prompts: how each is drawn, and which are the best."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, cast

from jaxspec.documents import plain_number
from jaxspec.engine.host.answer import Generation
from jaxspec.engine.host.request import Request
from jaxspec.engine.prompts import Prompt
from jaxspec.errors import OneLineError
from jaxspec.sampling import SamplingParams, sample_seed

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


def make_samples(
    prompts: Sequence[Prompt],
    each: Sequence[SamplingParams],
    count: int,
    make: Callable[[Prompt, SamplingParams], Request],
    make_from_ids: Callable[[list[int], SamplingParams], Request],
    *,
    have_own: bool,
) -> list[Request]:
    """Requests for `count` samples of every prompt, prompt by prompt, with the seeds of `Engine.generate`.

    Args:
      prompts, each: the prompts and their parameters.
      make, make_from_ids: make a request, from a prompt of any form and from token ids.
      have_own: whether each prompt has parameters of its own, so that equal prompts are not samples of one.
    """
    requests: list[Request] = []
    num_samples: Counter[Any] = Counter()
    for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        first = make(prompt, params)
        # Texts are turned into ids once.
        samples = [first, *(make_from_ids(first.prompt, params) for _ in range(count - 1))]
        key = i if have_own else tuple(first.prompt)
        for sample, request in enumerate(samples, num_samples[key]):
            request.seed = sample_seed(request.seed, sample)
        num_samples[key] += count
        requests += samples
    return requests


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
