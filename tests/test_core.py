"""The core alone: what loading and answering import, and names that users imported from rooms that moved."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxspec import moved

AROUND = ("grammar", "service", "lab", "commands")
MOVED = sorted(path.stem for path in Path(moved.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.fixture(scope="module")
def imported(tiny_config):
    """What of jaxspec a process has imported when a model has answered, and when it was given a grammar."""
    program = (
        "import sys, jaxspec\n"
        "with jaxspec.load(sys.argv[1], progress=False) as engine:\n"
        "    engine.generate('w1 w2', max_new_tokens=4)\n"
        "    print(*sys.modules)\n"
        "    try:\n"
        "        engine.make_request('w1', jaxspec.SamplingParams(choice=['w2', 'w3']))\n"
        "    except ValueError as error:\n"
        "        assert 'no text that the model' in str(error)\n"
        "    print(*sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tiny_config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        {name for name in line.split() if name.startswith("jaxspec.")}
        for line in done.stdout.splitlines()[-2:]
    ]


def test_loading_and_answering_imports_the_core_alone(imported):
    names, _ = imported
    assert {"jaxspec.engine.rounds.core", "jaxspec.files.safetensors.tensors"} <= names
    assert sorted(name for name in names if name.split(".")[1] in AROUND) == []


def test_a_grammar_is_compiled_by_a_package_around_the_core(imported):
    _, names = imported
    assert "jaxspec.grammar.compiler" in names


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_moved_is_an_error_that_says_the_new_one(name):
    rooms = (
        ("jaxspec.files",) if name == "checkpoints" else (f"jaxspec.service.{name}", f"jaxspec.lab.{name}")
    )
    (new,) = (room for room in rooms if find_spec(room))
    programs = [
        f"import jaxspec.{name}",
        f"import jaxspec.{name}.deeper",
        f"from jaxspec import {name}",
        f"from jaxspec.{name} import anything",
        f"import jaxspec; jaxspec.{name}",
    ]
    for program in programs:
        with pytest.raises(ImportError, match=f"^jaxspec.{name} is now {new}$"):
            exec(program, {})
