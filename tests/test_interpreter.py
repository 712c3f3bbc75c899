"""Processes of our own start from an interpreter, also inside programs that are none."""

import sys
from contextlib import closing

import pytest

from jaxspec.config import ConfigError
from jaxspec.files.text import chat_template
from jaxspec.interpreter import python_interpreter


@pytest.mark.parametrize("name", ["python", "python3", "python3.11", "Python3.13t", "python.exe"])
def test_an_interpreter_is_taken(monkeypatch, name):
    monkeypatch.setattr(sys, "executable", f"/bin/{name}")
    assert python_interpreter() == f"/bin/{name}"


@pytest.mark.parametrize("executable", [None, "", "/usr/bin/uwsgi", "/bin/false", "/opt/pythonista"])
def test_templates_are_rendered_in_a_program_that_embeds_python(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with closing(chat_template._TemplateProcess()) as process:
        monkeypatch.setattr(chat_template, "_process", process)
        messages = [{"role": "user", "content": "x"}]
        assert chat_template.render_chat("hello", messages, {}, add_generation_prompt=True) == "hello"


def test_a_frozen_program_is_not_started_again(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/opt/frozen/python")
    assert python_interpreter() != "/opt/frozen/python"


def test_without_any_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/opt/app")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sys.executable is '/opt/app' and python3.* is not in PATH"):
        python_interpreter()
