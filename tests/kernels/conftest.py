"""Tests that take `implementation` run over every one that can run here of the module's OP."""


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        unavailable = metafunc.module.OP.why_not_triton()
        metafunc.parametrize("implementation", ["xla"] if unavailable else ["xla", "triton"])
