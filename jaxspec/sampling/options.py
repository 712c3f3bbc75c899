"""The fields of `SamplingParams` as a caller may give them, for type checkers and editors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:  # command lines are read without them
    import jax
    import numpy as np

Kind = Literal["logprobs", "json", "penalties", "bias", "words"]
"""A kind of what requests may ask for; see `Engine.prepare`."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class _Options(TypedDict, total=False):
    """All but the seed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: "Sequence[int] | np.ndarray | jax.Array"
    ignore_eos: bool
    speculate: bool
    num_speculative_tokens: int | None
    logprobs: int | None
    logprobs_mode: LogprobsMode
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    bad_words: str | Sequence[str | Sequence[int]]
    min_tokens: int
    no_repeat_ngram_size: int
    choice: Sequence[str]
    regex: str | None
    json_schema: Any


class SamplingOptions(_Options, total=False):
    """For one prompt."""

    seed: int | None


class ManySamplingOptions(_Options, total=False):
    """For one prompt or several, each of which may have its own seed."""

    seed: "int | Sequence[int | None] | np.ndarray | jax.Array | None"
