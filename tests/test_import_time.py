"""What `import jaxspec` leaves for later: not how long it takes, which is the machine's business."""

import subprocess
import sys

# Each takes a tenth of a second or more, and is needed for some models, files or machines only.
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
