"""The sampling that a model's makers recommend."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import OneLineError
from jaxspec.sampling.params import SamplingParams

_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` from the contents of a `generation_config.json`.

    Only what says how tokens are chosen, and not how many there are. As in transformers, `do_sample` chooses
    between a temperature of 1 and greedy decoding where there is no temperature, or where it is false.

    Raises:
      OneLineError: a value has the wrong type or is out of its range.
    """
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    values = {name: generation[name] for name in _NAMES if name in known and generation.get(name) is not None}
    samples = generation.get("do_sample")
    if not (samples is None or isinstance(samples, bool)):
        raise OneLineError(f"generation_config.json: do_sample must be true or false, got {samples!r}")
    if samples is False:
        values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
        values["temperature"] = 0.0
    elif samples:
        values.setdefault("temperature", 1.0)
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise OneLineError(f"generation_config.json: {error}") from None
    return values
