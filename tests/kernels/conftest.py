"""Tests that take `implementation` run over every one that can run here of the module's OP."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        kernels = [name for name in ("triton", "numba") if not metafunc.module.OP.why_not(name)]
        metafunc.parametrize("implementation", ["xla", *kernels])
