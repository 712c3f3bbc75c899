"""Numbers of NumPy and JAX are taken wherever Python's are, and are Python's inside."""

from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.config import DrafterConfig, EngineConfig
from jaxspec.config.errors import at_least
from jaxspec.files.text.chat_template import render_chat
from jaxspec.lab.training import config as training
from jaxspec.weights.memory import array_tensors

GIVEN = [
    SamplingParams(
        max_new_tokens=3, temperature=0.5, seed=1, num_speculative_tokens=1, logprobs=1, stop_token_ids=(3,)
    ),
    EngineConfig(
        max_model_len=64,
        num_pages=8,
        prefill_chunk=4,
        prefill_batch_size=2,
        slot_sizes=(1, 2),
        steps_per_dispatch=2,
        synthetic_acceptance_length=1.5,
        exact=False,
        packed=True,
    ),
    DrafterConfig("ngram", draft_vocab_size=9),
    training.PromptsConfig(files=("a",)),
    training.ResponsesConfig(temperatures=(0.5, 1.0)),
    training.HeadConfig(capture=(1, 2), intermediate_size=3),
    training.TrainConfig(),
    training.EvaluateConfig(seeds=(1, 2)),
]


def of_numpy(value):
    """A number, or a sequence of numbers, as NumPy's; None if it is something else."""
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    if type(value) in kinds:
        return kinds[type(value)](value)
    if isinstance(value, tuple | list) and value and all(type(item) in kinds for item in value):
        return type(value)(map(of_numpy, value))
    return None


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: type(given).__name__)
def test_every_field_takes_numbers_of_numpy(given):
    """Alone, in sequences and as arrays of one axis."""
    count = 0
    for field in fields(given):
        value = getattr(given, field.name)
        forms = [] if of_numpy(value) is None else [of_numpy(value)]
        if forms and isinstance(value, tuple | list):
            forms.append(np.array(value))
        elif type(value) is int:
            forms.append(jnp.int32(value))
        for form in forms:
            found = getattr(replace(given, **{field.name: form}), field.name)
            assert list(found) == list(value) if isinstance(value, tuple | list) else found == value
            one, same = (x[0] if isinstance(x, tuple | list) else x for x in (found, value))
            assert type(one) is type(same), field.name
            count += 1
    assert count > 2


def test_a_bool_is_no_number_whosever_it_is():
    for value in (True, np.bool_(True)):
        with pytest.raises(ConfigError, match=r"^n must be a whole number of at least 1, got True$"):
            at_least("n", value, 1)
    with pytest.raises(ConfigError, match="must be a whole number of at most 9, got 10"):
        at_least("n", np.int64(10), 1, 9)


def test_arguments_of_a_template_may_be_numbers_of_numpy():
    given = {"count": np.int64(2), "is_short": np.bool_(True)}
    messages = [{"role": "user", "content": "hi"}]
    template = "{{ count + 1 }} {{ is_short }}"
    assert render_chat(template, messages, {}, add_generation_prompt=True, arguments=given) == "3 True"


def test_axes_may_be_numbers_of_numpy():
    names = lambda name: ("w", (np.int64(1), np.arange(1)))  # noqa: E731
    assert array_tensors({"v": np.zeros((2, 3))}, names, "weights")["w"].shape == (3, 2)
