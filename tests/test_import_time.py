"""`import jaxspec` does not import slow packages. The time itself depends on the machine."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

# Each takes a tenth of a second or more, and only some models, files or machines need it.
NOT_AT_IMPORT = (
    "gguf",
    "grain",
    "huggingface_hub",
    "jax_triton",
    "matplotlib",
    "numba",
    "orbax",
    "pandas",
    "pyarrow",
    "ray",
    "torch",
    "transformers",
    "triton",
)


def test_packages_that_few_need_are_imported_by_those():
    program = (
        "import sys, jaxspec, jaxspec.service.batch, jaxspec.__main__; jaxspec.load; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "jaxspec.engine.api.load" in imported
    assert sorted(imported & set(NOT_AT_IMPORT)) == []


def test_nothing_slow_is_imported_before_a_name_is_used():
    program = "import sys, jaxspec; jaxspec.list_configs(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"jax", "flax", "numpy"} & set(done.stdout.split())


def test_registries_are_filled_where_they_are_looked_up():
    """Without anything else of jaxspec that was imported before."""
    for program in (
        "from jaxspec.config import load_config as f; f('smollm2-135m')",
        "from jaxspec.config.model import FAMILIES as f; f['llama']",
        "from jaxspec.files.gguf.architecture import ARCHITECTURES as f; f['llama']",
    ):
        subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", ["jaxspec", "jaxspec.sampling", "jaxspec.lab.training"])
def test_the_type_checker_sees_the_names_that_are_imported_late(package):
    module = import_module(package)
    body = ast.parse(Path(module.__file__).read_text("utf-8")).body
    (choice,) = (node for node in body if isinstance(node, ast.If))
    seen = {(node.module, alias.name) for node in choice.body for alias in node.names}
    (modules,) = (node for node in ast.walk(choice.orelse[0]) if isinstance(node, ast.Dict))
    late = {(home, name) for home, names in ast.literal_eval(modules).items() for name in names.split()}
    assert late == seen
    assert {name for _, name in late} == set(module.__all__)
    for home, name in late:
        assert getattr(module, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
