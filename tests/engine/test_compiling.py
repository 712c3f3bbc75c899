"""Compiling beside a teardown, and interrupts while programs are being compiled."""

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_process import python

import jaxspec
from jaxspec.engine.device import compiling
from jaxspec.engine.device.programs import Programs
from jaxspec.jax_settings import own_settings
from jaxspec.lab.training.trainer import Trainer
from jaxspec.sampling import Asked, Constraints

TESTS = Path(__file__).parents[1]
SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
from jaxspec.engine.rounds.core import EngineCore
from jaxspec.engine.device.programs import Programs
from programs_when_run import compile_only_what_runs

class Slow:
    def compile(self, options):
        print("compiling", file=sys.stderr, flush=True)
        time.sleep(300)

if {ahead}:
    Programs._lower = lambda programs, size: Slow()
else:
    compile_only_what_runs()
    EngineCore._prepare = lambda core, *wanted: Slow().compile(None)
"""
LIBRARY = """
exec(open({slow!r}).read())
import jaxspec
with jaxspec.load({config!r}, progress=False) as engine:
    engine.generate("w6", logprobs=0)
"""


@pytest.fixture
def held(monkeypatch):
    """Background threads begin to compile once this event is set."""
    event, compile_one = threading.Event(), Programs.compile_one

    def compile_later(programs, size):
        assert event.wait(60)
        compile_one(programs, size)

    monkeypatch.setattr(Programs, "compile_one", compile_later)
    return event


@pytest.mark.parametrize("constraints", [Constraints(0), Constraints.GRAMMAR])
def test_a_program_that_compiles_while_its_engine_closes_says_nothing(
    tiny_config, compiled_behind, held, caplog, constraints
):
    caplog.set_level(logging.WARNING, "jaxspec")
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",), slot_sizes=(1,))
    programs = engine.programs
    if constraints:
        sizes = [size.doing(Asked(constraints=constraints)) for size in engine.core.later_sizes[:1]]
        programs._left.clear()
        engine.core.grammars.prepare()
        programs.compile_in_background(sizes)
    engine.close()
    held.set()
    programs.wait_compiled()
    assert not caplog.records


def test_an_engine_that_is_closed_compiles_no_more(tiny_config, compiled_behind):
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",))
    programs, sizes = engine.programs, engine.core.later_sizes
    engine.close()
    before = len(programs.compiled)
    programs.compile_in_background(sizes)
    engine.core.grammars.prepare()
    programs.wait_compiled()
    assert len(programs.compiled) <= before + 1  # one that was being compiled
    assert not engine.core.grammars.slab.size


def test_an_engine_that_is_dropped_is_not_waited_for(tiny_config, compiled_behind, held, caplog):
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",), slot_sizes=(1,))
    threads = engine.programs._background
    began = time.monotonic()
    del engine
    gc.collect()
    assert time.monotonic() - began < 10
    held.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not caplog.records


@pytest.fixture(params=["load", "a first request"])
def slow(request, tmp_path):
    """A file that has programs compile for minutes."""
    path = tmp_path / "slow.py"
    path.write_text(SLOW.format(tests=str(TESTS), ahead=request.param == "load"), "utf-8")
    return path


def interrupted(*words, stderr):
    """The status of a process that is interrupted while it compiles, and the seconds that it then took."""
    with python(*words, stderr=stderr, cwd=stderr.parent) as process:
        try:
            while "compiling" not in stderr.read_text("utf-8"):
                assert process.poll() is None, stderr.read_text("utf-8")
                time.sleep(0.05)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            return process.wait(30), time.monotonic() - began
        except subprocess.TimeoutExpired:
            return None, 30
        finally:
            process.kill()


def test_an_interrupted_command_does_not_wait_for_programs(slow, tiny_config, tmp_path):
    stderr = tmp_path / "stderr"
    words = ["-m", "jaxspec", "w6", "--model", tiny_config, "--import", slow, "--logprobs", "0", "--json"]
    status, seconds = interrupted(*words, stderr=stderr)
    assert status == 130
    assert seconds < 10  # one, on a machine that is not busy
    *_, last = stderr.read_text("utf-8").splitlines()
    assert last == "interrupted"
    assert "Traceback" not in stderr.read_text("utf-8")


def test_an_interrupted_program_does_not_wait_for_them_either(slow, tiny_config, tmp_path):
    stderr = tmp_path / "stderr"
    code = LIBRARY.format(slow=str(slow), config=str(tiny_config))
    status, seconds = interrupted("-c", code, stderr=stderr)
    assert status == 130
    assert seconds < 10
    assert stderr.read_text("utf-8").rstrip().endswith("KeyboardInterrupt")


def test_a_process_that_ends_by_itself_waits_for_the_program_that_is_being_compiled():
    code = (
        "import time; from jaxspec.engine.device import compiling\n"
        "compiling.start(lambda: (time.sleep(0.5), print('compiled')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "compiled\n")


@contextmanager
def alarm(seconds):
    """An interrupt of the main thread, so many seconds later."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_first_run_of_a_program_of_training_is_not_waited_for():
    """Later ones stay in the caller's thread."""
    trainer, ends, threads = object.__new__(Trainer), threading.Event(), []
    trainer._settings, trainer._have_run, trainer._frozen = own_settings, set(), {}

    def program(state, frozen, rows):
        threads.append(threading.current_thread())
        ends.wait(60)
        return state, rows

    trainer._update = program
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), alarm(0.2):
        trainer.update(1, 2)
    assert time.monotonic() - began < 20
    ends.set()
    assert [trainer.update(1, 2) for _ in range(2)] == [(1, 2)] * 2
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True]


def test_what_a_thread_raises_is_the_callers():
    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        compiling.interruptible(fails)
