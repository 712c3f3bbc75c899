"""Tests that take `implementation` run over every one that can run here of the module's OP."""


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        kernels = [name for name in ("triton", "numba") if not metafunc.module.OP.why_not(name)]
        metafunc.parametrize("implementation", ["xla", *kernels])
