"""What an import brings along: not how long it takes, which is the machine's business."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jaxspec

HEAVY = ("flax", "gguf", "huggingface_hub", "jax", "jinja2", "numba", "numpy", "optax", "orbax", "tokenizers")
CHECKPOINTS = {"jinja2", "numpy", "tokenizers"}


@pytest.mark.parametrize(
    ("statement", "needed"),
    [
        ("import jaxspec", set()),
        ("import jaxspec; jaxspec.list_configs()", set()),
        ("from jaxspec import EngineConfig", set()),
        ("from jaxspec.checkpoints import open_checkpoint", CHECKPOINTS),
        ("from jaxspec import load", {*CHECKPOINTS, "flax", "jax", "optax"}),
    ],
)
def test_an_import_brings_no_more_than_it_needs(statement, needed):
    program = f"{statement}; import sys; print(*sorted(set({HEAVY}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= needed


def test_every_public_name_is_the_one_that_type_checkers_see():
    tree = ast.parse(Path(jaxspec.__file__).read_text("utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxspec.")
        for alias in node.names
    }
    assert set(seen) == set(jaxspec.__all__) <= set(dir(jaxspec))
    for name, module in seen.items():
        assert getattr(jaxspec, name) is getattr(import_module(module), name), name
    with pytest.raises(AttributeError, match="module 'jaxspec' has no attribute 'nothing'"):
        _ = jaxspec.nothing
