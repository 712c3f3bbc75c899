"""The keywords of the ways to ask an engine, for type checkers and editors; `Engine` says what they mean."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import jax
import numpy as np

from jaxspec.config import EngineOptions
from jaxspec.drafters.formats import DrafterChoice
from jaxspec.jax_settings import Device
from jaxspec.sampling import ManySamplingOptions, SamplingOptions

Layer = int | Literal["last"]
"""A hidden state: for i the residual stream before layer i, for the number of layers the stream after the
last one, and for "last" the state after the final norm, from which logits are computed."""
Lengths = Sequence[int] | np.ndarray | jax.Array
"""The lengths of rows, i32[B]."""


class PromptOptions(TypedDict, total=False):
    """How a prompt is read."""

    raw: bool
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    special_tokens_as_text: bool


class AskOptions(SamplingOptions, PromptOptions, total=False):
    """How a prompt is read and its answer sampled."""


class AskManyOptions(ManySamplingOptions, PromptOptions, total=False):
    """How prompts are read and their answers sampled."""


def split_options(options: Mapping[str, Any]) -> tuple[PromptOptions, dict[str, Any]]:
    """How a prompt is read, and the other options."""
    of_prompt = {name: value for name, value in options.items() if name in PromptOptions.__annotations__}
    rest = {name: value for name, value in options.items() if name not in of_prompt}
    return cast(PromptOptions, of_prompt), rest


class GenerateOptions(AskManyOptions, total=False):
    """Of `Engine.generate`, but for `n`, which decides what is returned."""

    best_of: int | None


class RequestOptions(GenerateOptions, total=False):
    """Of `AsyncEngine.generate`, but for `n`."""

    id: int | str | None
    priority: int
    deadline: float | None


class ModelOptions(GenerateOptions, total=False):
    """Of `jaxspec.generate`, but for `n`."""

    drafter: DrafterChoice | None
    device: Device | None
    progress: bool
    engine: EngineOptions | None


class SampleOptions(AskManyOptions, total=False):
    """Of `Engine.sample`."""

    n: int
    length: int | None


class ScoreOptions(TypedDict, total=False):
    """Of `Engine.score`."""

    lengths: Lengths | None
    top: int
    hidden: Sequence[Layer] | Layer
    temperature: float
