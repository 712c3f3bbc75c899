"""Several samples of several prompts: how each is drawn, and which are the best."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Unpack, cast

import jax
import numpy as np

from jaxspec.documents import whole_number
from jaxspec.engine.api.calls import Call, check_answers
from jaxspec.engine.api.prompts import Prompt, as_prompts, is_one_prompt
from jaxspec.engine.host.answer import Generation
from jaxspec.engine.host.request import Request
from jaxspec.engine.rounds.options import AskManyOptions, split_options
from jaxspec.errors import OneLineError
from jaxspec.sampling import SamplingParams, sample_seed
from jaxspec.sharding import leaving

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


@dataclass(frozen=True)
class Samples:
    """Samples as arrays for a training step: plain ones on the engine's first device, as `jnp.asarray` makes.

    They compute beside arrays of any mesh, and under any mesh (`jax.set_mesh`): JAX puts them where the
    others are.

    A row is a prompt and its answer, padded behind. So one forward pass over `tokens` gives the logits of
    every answer's tokens: those of token t are at t - 1, and the loss takes `mask[:, 1:]`. N is the number of
    prompts times n; the samples of a prompt stand side by side, so `reshape(-1, n, …)` groups them.

    Attributes:
      tokens: i32[N, T], padded with zeros.
      mask: bool[N, T], where a token of an answer stands.
      logprobs: f32[N, T], the log-probability of every token of an answer, 0 elsewhere;
        `SamplingParams.logprobs_mode` says of which distribution.
      prompt_lengths: i32[N], the tokens of each prompt.
      lengths: i32[N], those of prompt and answer together.
      weights_version: see `Generation`; that of all samples.
      generations: the same samples as answers, for example for their texts.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    weights_version: int
    generations: list[Generation]


def generate_call(
    make: Callable[..., Request],
    prompts: Prompt | Sequence[Prompt],
    params: Params | Sequence[Params],
    *,
    n: int | None,
    best_of: int | None = None,
    **options: Unpack[AskManyOptions],
) -> Call[Any]:
    """The requests of `Engine.generate`, which has its arguments and errors.

    Args:
      make: `Engine.make_request`.
    """
    how, sampling = split_options(options)
    every, is_one = as_prompts(prompts), is_one_prompt(prompts)
    wanted = check_count("n", n)
    drawn = check_count("best_of", best_of, wanted)
    each, have_own = params_of_prompts(params, sampling, None if is_one else len(every))
    _check_differ("n" if best_of is None else "best_of", drawn, each)
    each = each if best_of is None else list(map(with_logprobs, each))
    requests = make_samples(every, each, drawn, partial(make, **how), make, have_own=have_own)

    def finish(generations: Sequence[Generation]) -> Any:
        answers: list[Any] = []
        for start in range(0, len(requests), drawn):
            of_prompt = list(generations[start : start + drawn])
            chosen = of_prompt if best_of is None else best(of_prompt, wanted)
            answers.append(chosen[0] if n is None else chosen)
        return answers[0] if is_one else answers

    return Call(requests, finish)


def sample_call(
    engine: Any,
    prompts: Prompt | Sequence[Prompt],
    params: Params | Sequence[Params],
    *,
    n: int = 1,
    length: int | None = None,
    **options: Unpack[AskManyOptions],
) -> Call[Samples]:
    """The requests of the method `sample` of an Engine, which has these arguments and their errors."""
    how, sampling = split_options(options)
    make = engine.make_request
    every = as_prompts(prompts)
    count = check_count("n", n)
    each, have_own = params_of_prompts(params, sampling, None if is_one_prompt(prompts) else len(every))
    _check_differ("n", count, each)
    if any(own.logprobs for own in each):
        raise OneLineError("logprobs: samples have those of their own tokens, and no others")
    each = list(map(with_logprobs, each))
    requests = make_samples(every, each, count, partial(make, **how), make, have_own=have_own)
    longest = max((len(request.prompt) + request.max_new_tokens for request in requests), default=0)
    size = check_count("length", length, longest)
    for request in requests:
        request.together = requests

    def finish(generations: Sequence[Generation]) -> Samples:
        version = check_answers("sample", generations)
        shape = len(generations), size
        tokens, mask, logprobs = (np.zeros(shape, dtype) for dtype in (np.int32, bool, np.float32))
        prompt_lengths, lengths = (np.zeros(len(generations), np.int32) for _ in range(2))
        for i, answer in enumerate(generations):
            start = prompt_lengths[i] = len(answer.prompt_token_ids)
            stop = lengths[i] = start + len(answer.token_ids)
            tokens[i, :stop] = answer.prompt_token_ids + answer.token_ids
            mask[i, start:stop] = True
            logprobs[i, start:stop] = answer.logprobs
        put = partial(leaving, device=engine.core.device)
        sizes = put(prompt_lengths), put(lengths)
        return Samples(put(tokens), put(mask), put(logprobs), *sizes, version, list(generations))

    return Call(requests, finish)


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
    value = least if value is None else whole_number(value)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise OneLineError(f"{name} must be an integer, {least} or more, got {value!r}")
    return int(value)


def _check_differ(name: str, count: int, each: Sequence[SamplingParams]) -> None:
    if count > 1 and not all(own.temperature for own in each):
        raise OneLineError(
            f"{name} is {count}, but at temperature 0 all answers to a prompt are equal; "
            "give a temperature, such as 1.0"
        )


def _check_list(name: str, items: Sequence[Any], prompts: int | None) -> None:
    if prompts is None:
        raise OneLineError(f"{name}: a list needs a list of prompts")
    if len(items) != prompts:
        raise OneLineError(f"{name}: a list of {len(items)} does not fit {prompts} prompts")
