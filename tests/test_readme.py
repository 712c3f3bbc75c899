"""Claims of the README that can be checked without installing anything; its example is run by
`test_default_configuration.py`."""

import re
import subprocess
import tomllib
from pathlib import Path

from jaxspec.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def first_screen():
    return "\n".join(README.splitlines()[:50])


def test_the_two_commands_come_first_and_need_nothing_before_them():
    answer, test = blocks("sh")[:2]
    setup = "python3 -m venv .venv && .venv/bin/pip install --quiet -e "
    assert answer.startswith(setup)
    assert '.venv/bin/jaxspec "' in answer
    assert test == setup + '".[dev]" && .venv/bin/python -m pytest -n auto --dist loadfile\n'
    assert "pip install" not in README.split("```sh")[0]


def test_ci_runs_the_second_command():
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert blocks("sh")[1].strip() + " || exit 1\n" in ci
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def test_the_first_screen_shows_an_example_with_its_output():
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 10
    assert example in first_screen()
    assert blocks("text")[0] in first_screen()


def test_what_the_default_configuration_is():
    default = tomllib.loads((ROOT / "configs" / "smollm2-135m.toml").read_text("utf-8"))
    listed = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    assert f"that of `{default['extends']}`" in listed
    kind = load_config("smollm2-135m").drafter.kind
    assert f"**The default configuration drafts by {kind.replace('ngram', 'n-gram')}**" in README
