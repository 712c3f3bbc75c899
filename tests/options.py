"""What the tests in `wiring/` share: the options of an entry point, by introspection, and values that act.

A table names, for every option of an entry point, a value and what shows that it arrived. `assert_complete`
compares the table with the entry point, so that an option without an entry fails.
"""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from jaxspec import Engine, Generation, Request, SamplingParams
from jaxspec.config import EngineConfig


def parameters(function: Callable[..., Any]) -> set[str]:
    """A function's parameters by name, without `self`. Those of its dictionary of options count, but for the
    fields of `SamplingParams` and `EngineConfig`, and what gathers others."""
    names = set()
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            names.add(each.name)
        for options in get_args(each.annotation) if each.kind == each.VAR_KEYWORD else ():
            known = [
                own
                for own in map(fields, (SamplingParams, EngineConfig))
                if own <= options.__annotations__.keys()
            ]
            names |= set(options.__annotations__).difference(*known)
    return names - {"self"}


def fields(cls: type) -> set[str]:
    """The fields of a dataclass."""
    return {each.name for each in dataclasses.fields(cls)}


def parser_of(main: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser that a command line makes. Nothing else of `main` is run."""

    class Made(BaseException):
        pass

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise Made(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        try:
            main(["nothing"])
        except Made as made:
            return made.args[0]
    raise AssertionError(f"{main.__module__} makes no parser")


def arguments(main: Callable[..., Any]) -> set[str]:
    """The names under which a command line's arguments are parsed."""
    return {action.dest for action in parser_of(main)._actions if action.dest not in ("help", "version")}


def assert_complete(entry: str, options: set[str], *tables: Collection[str]) -> None:
    """Asserts that the tables together have an entry for each option of an entry point, and no others."""
    known = {name for table in tables for name in table}
    assert not options - known, f"{entry}: no test shows that {sorted(options - known)} arrive"
    assert not known - options, f"{entry}: has no option {sorted(known - options)}"


@dataclass(frozen=True)
class Change:
    """A value of a sampling parameter that changes an answer.

    Attributes:
      value: the value, or a function that makes it from the plain answer.
      beside: other parameters, beside which it makes a difference.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)

    def options(self, name: str, plain: Generation) -> dict[str, Any]:
        """The parameters to ask with."""
        return {**self.beside, name: self.value(plain) if callable(self.value) else self.value}


PROMPT = "w6 w7"
SAMPLED = {"temperature": 1.0, "seed": 4}
SAMPLING = {
    "temperature": Change(0.7, {"seed": 4}),
    "top_k": Change(2, SAMPLED),
    "top_p": Change(0.2, SAMPLED),
    "min_p": Change(0.6, SAMPLED),
    "seed": Change(5, {"temperature": 1.0}),
    "max_new_tokens": Change(3),
    "stop": Change(lambda plain: plain.text.split()[2:3]),
    "stop_token_ids": Change(lambda plain: plain.token_ids[2:3]),
    "ignore_eos": Change(True),
    "num_speculative_tokens": Change(1),
    "logprobs": Change(2),
    "logprobs_mode": Change("processed_logprobs", {"temperature": 0.5, "seed": 4, "logprobs": 2}),
    "repetition_penalty": Change(3.0),
    "presence_penalty": Change(2.0, SAMPLED),
    "frequency_penalty": Change(2.0, SAMPLED),
    "logit_bias": Change({9: 100}),
    "bad_words": Change(lambda plain: plain.text.split()[2:3]),
    "min_tokens": Change(12),
    "no_repeat_ngram_size": Change(1),
    "choice": Change(["w9 w10 w11", "w12"]),
    "regex": Change("w9( w1[0-9]){2,4}"),
    "json_schema": Change({"type": "null"}),
}
"""Every field of `SamplingParams`."""


def same(answer: Generation) -> tuple[Any, ...]:
    """What two answers must have in common to be the same."""
    # Programs may round log-probabilities differently.
    chosen = answer.logprobs and [round(value, 3) for value in answer.logprobs]
    top = answer.top_logprobs and list(map(list, answer.top_logprobs))
    said = answer.prompt_token_ids, answer.token_ids, answer.text, answer.finish_reason, answer.verified
    return *said, chosen, top


def answer_to(engine: Engine, prompt: Any, options: Mapping[str, Any], **more: Any) -> Generation:
    """The answer by the shortest way: a request from `SamplingParams`, run by the engine."""
    ((_, answer),) = engine.run([engine.make_request(prompt, SamplingParams(**options), **more)])
    return answer


@contextmanager
def submitted(engine: Engine):
    """A list of the requests that reach an engine in the meantime."""
    requests: list[Request] = []
    submit = engine.submit

    def recording(new, listener):
        requests.extend(new)
        submit(new, listener)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", recording)
        yield requests
