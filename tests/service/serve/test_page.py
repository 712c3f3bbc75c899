"""docs/serve.md: its examples run, and its tables are what the server has."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from options import arguments, parser_of

import jaxspec
from jaxspec import SamplingParams
from jaxspec.commands import serve
from jaxspec.sampling import Asked
from jaxspec.sampling.params import Kind
from jaxspec.service.openai import CHAT, FIELDS
from jaxspec.service.openai.requests import SAMPLING

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text("utf-8")


def blocks(language, of_server):
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    told = "http://127.0.0.1:8000"
    return [block.replace(told, of_server).replace('"smollm2-135m"', '"tiny"') for block in found]


def test_the_client_of_the_page(server, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    client = blocks("python", server.url)[0]
    exec(compile(client.replace("max_tokens=64", "max_tokens=8"), "page", "exec"), {})
    assert "drafted_tokens=" in capsys.readouterr().out


def test_the_program_of_the_page(tiny_config, capsys, monkeypatch):
    load = jaxspec.load
    monkeypatch.setattr(
        jaxspec, "load", lambda model, **options: load(tiny_config, progress=False, **options)
    )
    exec(compile(blocks("python", "")[1], "page", "exec"), {})
    assert capsys.readouterr().out == "OpenAI's API over tiny, decoded speculatively.\n"


def test_the_curl_of_the_page(server):
    command = next(block for block in blocks("sh", server.url) if block.startswith("curl"))
    done = subprocess.run(
        [*shlex.split(command), "-sS", "--noproxy", "*"], capture_output=True, text=True, check=True
    )
    assert '"finish_reason":' in done.stdout


def test_every_metric_is_on_the_page(http):
    shown = set(re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, flags=re.MULTILINE))
    shown -= {name for name in shown if name.endswith("_created")}
    section = PAGE.split("## Metrics")[1].split("## ")[0]
    assert set(re.findall(r"`((?:vllm|jaxspec):\w+)`", section)) == shown


def test_every_option_and_every_field_is_on_the_page():
    missing = {
        option
        for option in arguments(serve.main) - {"model", "imports"}
        if f"--{option.replace('_', '-')}" not in PAGE
    }
    assert missing == set()
    named = set(re.findall(r"`\"?(\w+)\"?(?:: [^`]*)?`", PAGE))
    without_effect = {name for name in FIELDS[CHAT] if name in PAGE}
    assert {"user", "metadata", "prediction"} <= without_effect
    own = {name for name in SAMPLING if name in FIELDS[CHAT]}
    plain = {"temperature", "top_p", "seed", "stop", "logprobs", "presence_penalty", "frequency_penalty"}
    assert own - plain - {"logit_bias"} <= named


def test_every_kind_that_can_be_prepared_is_on_the_page():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE, flags=re.MULTILINE))
    asking = {"logprobs": {"logprobs": 1}, "json": {"choice": ("a",)}, "penalties": {"presence_penalty": 1}}
    asking |= {"bias": {"min_tokens": 1}, "words": {"no_repeat_ngram_size": 2}}
    assert list(asking) == list(get_args(Kind))
    for kind, asked in asking.items():
        (name,) = asked
        assert f"`{name}`" in rows[kind]
        assert Asked.of(SamplingParams(**asked)) == Asked.of_kinds([kind])


def test_it_is_a_path_that_is_served(http):
    page = http.get("/openapi.json").json()
    for path in page["paths"]:
        assert path.replace("{name}", "NAME") in PAGE


@pytest.mark.parametrize("name", ["--max-queue", "--max-body", "--grace"])
def test_defaults_are_those_of_the_command(name):
    value = {"--max-queue": "(256)", "--max-body": "(4 MiB)", "--grace": "(30)"}[name]
    assert value in next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}"))
    default = next(
        action.default for action in parser_of(serve.main)._actions if name in action.option_strings
    )
    assert default == {"--max-queue": 256, "--max-body": 4 * 2**20, "--grace": 30.0}[name]
