"""`import jaxspec` does not import slow packages. The time itself depends on the machine."""

import subprocess
import sys

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
    program = "import sys, jaxspec, jaxspec.batch, jaxspec.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "jaxspec.engine.load" in imported
    assert sorted(imported & set(NOT_AT_IMPORT)) == []
