"""The keywords of the ways to ask an engine, for type checkers and editors; `Engine` says what they mean."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import jax
import numpy as np

from jaxspec.config import EngineOptions
from jaxspec.drafters.formats import DrafterChoice
from jaxspec.jax_settings import Device
from jaxspec.sampling import ManySamplingOptions

Layer = int | Literal["last"]
"""A hidden state: for i the residual stream before layer i, for the number of layers the stream after the
last one, and for "last" the state after the final norm, from which logits are computed."""
Lengths = Sequence[int] | np.ndarray | jax.Array
"""The lengths of rows, i32[B]."""


class _TemplateOptions(TypedDict, total=False):
    raw: bool
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    special_tokens_as_text: bool


class GenerateOptions(ManySamplingOptions, _TemplateOptions, total=False):
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


class SampleOptions(ManySamplingOptions, _TemplateOptions, total=False):
    """Of `Engine.sample`."""

    n: int
    length: int | None


class ScoreOptions(TypedDict, total=False):
    """Of `Engine.score`."""

    lengths: Lengths | None
    top: int
    hidden: Sequence[Layer] | Layer
    temperature: float
