from types import SimpleNamespace

import pytest
from jaxspec_kernels import op

from jaxspec.sampling import SamplingMode, SamplingParams, modes_for_sampling, required_mode


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({}, SamplingMode.GREEDY),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, SamplingMode.GREEDY),
        ({"temperature": 0.7}, SamplingMode.TEMPERATURE),
        ({"temperature": 0.7, "min_p": 0.1, "top_k": -1}, SamplingMode.TEMPERATURE),
        ({"temperature": 0.7, "top_k": 1}, SamplingMode.TRUNCATED),
        ({"temperature": 0.7, "top_p": 0.99}, SamplingMode.TRUNCATED),
    ],
)
def test_the_least_mode_that_serves(params, mode):
    assert required_mode(SamplingParams(**params)) is mode


@pytest.mark.parametrize(
    ("backend", "modes"),
    [
        ("cpu", (SamplingMode.TRUNCATED,)),
        ("gpu", (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED)),
    ],
)
def test_a_program_without_searches_is_made_where_they_would_always_run(monkeypatch, backend, modes):
    monkeypatch.setattr(op, "device", lambda: SimpleNamespace(platform=backend))
    assert modes_for_sampling() == modes
