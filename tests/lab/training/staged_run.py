"""Training runs that are stopped where a stage would begin to compute, and what it is given there."""

import numpy as np
import pytest

from jaxspec import AcceptanceStats, Generation
from jaxspec.config import SourceConfig
from jaxspec.lab.training import pipeline
from jaxspec.lab.training.config import TrainingRun

IDS = np.arange(5, 245, 3, dtype=np.int32)


class Echo:
    """An engine whose answers are a text and its end, but for those that are cut off; it records what it is
    asked."""

    max_model_len = 999

    def __init__(self, tokens, cut=()):
        self.tokens, self.cut, self.asked = tokens, cut, []

    def make_request(self, prompt, params):
        self.asked.append((prompt, params))
        return prompt, params

    def run(self, requests):
        for i, (prompt, params) in enumerate(requests):
            tokens = [*self.tokens, *prompt[-1:], 2][-params.max_new_tokens :]
            reason = "length" if i in self.cut else "stop"
            yield i, Generation("", tokens, reason, prompt, AcceptanceStats(), params.seed)


def opened(files, tmp_path, target=None, **sections):
    """A pipeline whose sections are the defaults but for these."""
    run = TrainingRun(target=target or SourceConfig(str(files / "target")), **sections)
    return pipeline.Pipeline(run, tmp_path / "out", data=files)


class Given(BaseException):
    """What a stage was about to use."""


def give(*told, **options):
    raise Given(told, options)


def given(call, *arguments):
    with pytest.raises(Given) as told:
        call(*arguments)
    return told.value.args
