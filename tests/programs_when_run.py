"""Programs that are compiled when they first run."""

import weakref
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.device.plan import Size
from jaxspec.engine.device.programs import Programs

compile_ahead = Programs.compile
"""As outside of the tests."""


class ProgramWhenRun:
    """Stands for a program of an engine until it is called, or anything is asked of it."""

    def __init__(self, programs: Programs, size: Size):
        self._programs, self._size = weakref.ref(programs), size

    def _compiled(self) -> Any:
        programs = self._programs()
        assert programs is not None
        if programs.compiled.get(self._size) is self:
            with programs._settings():
                grammars = programs._shape_of_grammars(self._size)
                programs.compiled[self._size] = programs.lowering.compile(self._size, grammars)
        return programs.compiled[self._size]

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled()(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled(), name)


def compile_only_what_runs() -> None:
    """In a process of a test's own; see `conftest.only_what_runs_is_compiled`."""
    Programs.compile = compile_when_run  # type: ignore[method-assign]
    Programs.compile_in_background = lambda programs, sizes: None  # type: ignore[method-assign]


def compile_now(programs: Programs) -> None:
    """Compiles those that have not run."""
    for program in list(programs.compiled.values()):
        if isinstance(program, ProgramWhenRun):
            program._compiled()


def share_programs(programs: Programs, of: Programs) -> None:
    """Gives an engine the programs that ran in one of equal networks and settings, which takes their weights
    with every call."""
    ran = {size: each for size, each in of.compiled.items() if not isinstance(each, ProgramWhenRun)}
    programs.compiled.update(ran)


def compile_when_run(programs: Programs, sizes: Sequence[Size], *, progress: bool) -> None:
    """In place of `Programs.compile`."""
    for size in sizes:
        if programs.compiled.get(size) is None:
            programs.compiled[size] = ProgramWhenRun(programs, size)
