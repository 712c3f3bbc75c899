"""Tests that take `implementation` run over every one that can run here of the `op` of their class, or the OP
of their module. Those of an `OpTest` take it with a `case`, or with a `usual_case`, of their class."""

import pytest

MARKS = {"triton": pytest.mark.gpu}


def pytest_generate_tests(metafunc):
    if "implementation" not in metafunc.fixturenames:
        return
    subject = metafunc.cls
    op = subject.op if subject else metafunc.module.OP
    runnable = [name for name in op.implementations if not op.why_not(name)]
    kind = next((name for name in ("case", "usual_case") if subject and name in metafunc.fixturenames), None)
    if kind is None:
        each = [pytest.param(name, id=name, marks=MARKS.get(name, ())) for name in runnable]
        metafunc.parametrize("implementation", each)
        return
    cases = [case for case in subject.cases if kind == "case" or case.name in subject.usual]
    pairs = [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=MARKS.get(name, ()))
        for name in runnable
        for case in cases
        if subject.is_for(case, name)
    ]
    metafunc.parametrize(("implementation", kind), pairs)
