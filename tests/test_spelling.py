"""What was probably meant by a name that is not known."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jaxspec
from jaxspec import SamplingParams
from jaxspec import __main__ as command
from jaxspec.commands import generate
from jaxspec.config import EngineConfig, list_configs
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.models.registry import FAMILIES
from jaxspec.service.openai.requests import CHAT, FIELDS, RequestError, read_body
from jaxspec.service.rows.row import KEYS, make_row
from jaxspec.spelling import _SAME, known_names, nearest

SAMPLING = [each.name for each in fields(SamplingParams)]
ENGINE = [each.name for each in fields(EngineConfig)]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("temprature", SAMPLING, "temperature"),
        ("max_tokens", SAMPLING, "max_new_tokens"),
        ("maxTokens", SAMPLING, "max_new_tokens"),
        ("max_new_tokens", FIELDS[CHAT], "max_completion_tokens"),
        ("guided_json", SAMPLING, "json_schema"),
        ("speculate", SAMPLING, "num_speculative_tokens"),
        ("max_num_seqs", ENGINE, "batch_size"),
        ("tensor_parallel_size", ENGINE, "tensor_parallel"),
        ("maxmodellen", ENGINE, "max_model_len"),
        ("smollm2", list_configs(), "smollm2-135m"),
        ("eagel3", DRAFTERS, "eagle3"),
        ("eagle", DRAFTERS, "eagle3"),  # not peagle
        ("qwen-3", FAMILIES, "qwen3"),
        ("--max-tokens", ["--max-new-tokens", "--model"], "--max-new-tokens"),
        ("num_beams", SAMPLING, None),
        ("prompt", FIELDS[CHAT], None),
        ("x" * 10**6, SAMPLING, None),
        (7, SAMPLING, None),
        ("", SAMPLING, None),
    ],
)
def test_the_name_that_was_meant(name, known, meant):
    assert nearest(name, known) == meant
    assert known_names(name, ["a", "b"]) == "known: a, b"


def test_every_group_of_names_for_one_thing_begins_with_a_name_of_ours():
    ours = {*SAMPLING, *ENGINE, *KEYS, *(each.name for each in fields(jaxspec.DrafterConfig)), "drafter"}
    assert [group for group in _SAME if group[0] not in ours] == []
    names = [name for group in _SAME for name in group]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["batc"], "there is no command batc; did you mean batch? As a prompt: jaxspec generate batc"),
        (["srve", "smollm2-135m"], "there is no command srve; did you mean serve?"),
        (["Hi", "there"], "a prompt of several words needs quotes: jaxspec 'Hi there' (see --help)"),
        (["Hi", "--temprature", "1"], "there is no option --temprature; did you mean --temperature?"),
        (["Hi", "--max-tokens=5"], "there is no option --max-tokens; did you mean --max-new-tokens?"),
        (["Hi", "--nothing-like-it"], "there is no option --nothing-like-it (see --help)"),
        (["batch", "smollm2-135m", "--imput", "in"], "there is no option --imput; did you mean --input?"),
        (["Hi", "-temperature", "1"], "there is no option -temperature; did you mean --temperature?"),
        (["chat", "Hi"], "unexpected Hi"),
        (["Hi", "--model", "smollm2"], "; did you mean 'smollm2-135m'? known: "),
        (["Hi", "--model", "./nothing"], "error: ./nothing: no such file or folder"),
        (["Hi", "--model", "nothing.gguf"], "error: nothing.gguf: no such file or folder"),
        (["Hi", "--model", "nothing.toml"], "error: nothing.toml: no such file or folder"),
        (["inspect", "smolm2-135m"], "; did you mean 'smollm2-135m'? known: "),
        (["convert", "smolm2-135m", "out"], "; did you mean 'smollm2-135m'? known: "),
        (["train", "--adapt", "smollm2-eagle3", "--output", "o"], "; did you mean 'smollm2-135m-eagle3'?"),
        (["train", "nothing.toml", "--output", "o"], "error: nothing.toml: no such file or folder"),
        (["batch", "smolm2-135m", "--input", "i", "--output", "o"], "; did you mean 'smollm2-135m'? known: "),
    ],
)
def test_a_word_that_is_not_known_is_one_line_with_what_was_meant(words, problem, capsys):
    try:
        status = command.main(words)
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr().err
    assert status == (1 if words[0] == "convert" else 2)
    assert problem in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("prompt", ["what", "Hello", "batch job", "trained?"])
def test_a_prompt_of_one_word_is_no_command(prompt, monkeypatch):
    told = []
    monkeypatch.setattr(generate, "main", lambda words: told.append(words) or 0)
    assert command.main([prompt, "--temp", "1"]) == 0
    assert command.main(["generate", "batc"]) == 0
    assert told == [[prompt, "--temp", "1"], ["batc"]]


def test_a_text_that_looks_like_an_option_and_short_forms_are_read(monkeypatch):
    told = []
    monkeypatch.setattr(
        generate, "_answer", lambda args: told.append((args.prompt, args.max_new_tokens)) or 0
    )
    assert command.main(["--max-new", "3", "--", "--nothing"]) == 0
    assert command.main(["--max-new", "3", "--what is this"]) == 0
    assert told == [("--nothing", 3), ("--what is this", 3)]


def test_keywords_of_other_libraries_are_answered_with_ours(tiny_engine, tiny_config):
    for call in (
        lambda: tiny_engine.generate("w6", max_tokens=3),
        lambda: tiny_engine.stream("w6", max_tokens=3),
        lambda: tiny_engine.sample("w6", max_tokens=3),
        lambda: tiny_engine.default_params(max_tokens=3),
        lambda: jaxspec.generate("w6", tiny_config, max_tokens=3),
        lambda: make_row("row", {"prompt": "a", "max_tokens": 3}, 0),
    ):
        with pytest.raises(ValueError, match="did you mean 'max_new_tokens'"):
            call()
    with pytest.raises(TypeError, match="did you mean 'max_new_tokens'"):
        SamplingParams(max_tokens=3)
    with pytest.raises(jaxspec.ConfigError, match=r"key engine\.max_num_seqs; did you mean 'batch_size'"):
        jaxspec.load(tiny_config, max_num_seqs=3)
    with pytest.raises(
        jaxspec.ConfigError, match=r"engine\.kind; it is one of \[drafter\]: drafter={'kind': …}$"
    ):
        jaxspec.load(tiny_config, kind="ngram")
    with pytest.raises(RequestError, match=r"'max_new_tokens'; did you mean 'max_completion_tokens'"):
        read_body({"model": "m", "messages": [], "max_new_tokens": 3}, CHAT)


def test_python_knows_the_names_that_are_imported_late():
    """And says which was meant."""
    with pytest.raises(AttributeError) as error:
        jaxspec.lod  # noqa: B018
    assert (error.value.name, error.value.obj) == ("lod", jaxspec)
    assert "load" in dir(jaxspec)


def test_no_message_lists_known_names_by_itself():
    """So that every one says what was meant."""
    code = Path(jaxspec.__file__).parent.rglob("*.py")
    by_hand = re.compile(r"known: \{', '\.join|; known: \{")
    assert [path.name for path in code if by_hand.search(path.read_text("utf-8"))] == ["spelling.py"]


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from jaxspec.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("module", ["argparse", "jaxspec.config", "jax", "numpy._core._multiarray_umath"])
def test_an_interrupt_while_modules_are_imported_is_one_line(tiny_config, module):
    """Extension modules print what is raised in their imports, or hang."""
    words = [sys.executable, "-c", INTERRUPTED, module, "Hi", "--model", str(tiny_config)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
