"""Compiling beside a teardown, and interrupts while programs are being compiled."""

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_process import python

import jaxspec
from jaxspec.engine.device import compiling
from jaxspec.engine.device import programs as programs_module
from jaxspec.engine.device.lowering import Lowering
from jaxspec.engine.device.programs import Programs
from jaxspec.jax_settings import own_settings
from jaxspec.lab.training.trainer import Trainer
from jaxspec.sampling import Asked, Constraints

TESTS = Path(__file__).parents[1]
SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
from jaxspec.engine.rounds.preparation import Preparation
from jaxspec.engine.device.lowering import Lowering
from programs_when_run import compile_only_what_runs

class Slow:
    def compile(self, options):
        print("compiling", file=sys.stderr, flush=True)
        time.sleep(300)

if {ahead}:
    Lowering.lower = lambda lowering, size, grammars: Slow()
else:
    compile_only_what_runs()
    Preparation._prepare = lambda preparation, *wanted: Slow().compile(None)
"""
LIBRARY = """
exec(open({slow!r}).read())
import jaxspec
with jaxspec.load({config!r}, progress=False) as engine:
    engine.generate("w6", logprobs=0)
"""


@pytest.fixture
def held(monkeypatch):
    """Background threads go on once this event is set; `begun` counts those that wait or have waited."""
    event, compile_it = threading.Event(), Lowering.compile
    event.begun = threading.Semaphore(0)

    def compile_later(lowering, size, grammars):
        event.begun.release()
        assert event.wait(60)
        return compile_it(lowering, size, grammars)

    monkeypatch.setattr(Lowering, "compile", compile_later)
    return event


def test_a_program_that_compiles_while_its_engine_closes_says_nothing(
    tiny_config, compiled_behind, held, caplog
):
    caplog.set_level(logging.WARNING, "jaxspec")
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",), slot_sizes=(1,))
    programs = engine.programs
    assert held.begun.acquire(timeout=60)
    engine.close()
    held.set()
    programs.wait_compiled()
    assert not caplog.records


def test_a_program_that_a_thread_has_taken_as_its_engine_closes_is_left_out(
    tiny_config, compiled_behind, caplog, monkeypatch
):
    """Its grammars are gone."""
    caplog.set_level(logging.WARNING, "jaxspec")
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",), slot_sizes=())
    programs, closed, begin = engine.programs, threading.Event(), Programs.begin
    programs.wait_compiled()
    monkeypatch.setattr(Programs, "begin", lambda *arguments: closed.wait(60) and begin(*arguments))
    engine.core.grammars.prepare()
    size = next(iter(programs.compiled)).doing(Asked(constraints=Constraints.GRAMMAR))
    programs.compile_in_background([size])
    while programs._left:  # until a thread has taken it
        time.sleep(0.01)
    engine.close()
    closed.set()
    programs.wait_compiled()
    assert size not in programs.compiled
    assert not caplog.records


def test_what_fails_because_the_process_ends_is_not_reported(
    tiny_config, compiled_behind, caplog, monkeypatch
):
    """JAX clears its caches at the end, also those of a trace that goes on."""
    ending = threading.Event()

    def fails(lowering, size, grammars):
        ending.set()
        raise KeyError("Var(id=1)")

    monkeypatch.setattr(Lowering, "compile", fails)
    monkeypatch.setattr(programs_module, "is_ending", ending.is_set)
    caplog.set_level(logging.WARNING, "jaxspec")
    with jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",), slot_sizes=(1,)) as engine:
        engine.programs.wait_compiled()
        assert ending.is_set()
    assert not caplog.records


def test_an_engine_that_is_closed_compiles_no_more(tiny_config, compiled_behind, monkeypatch):
    monkeypatch.setattr(programs_module.os, "cpu_count", lambda: 1)
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",))
    programs, sizes = engine.programs, engine.core.preparation.sizes[1]
    engine.close()
    before = len(programs.compiled)
    programs.compile_in_background(sizes)
    engine.core.grammars.prepare()
    programs.wait_compiled()
    assert len(programs.compiled) <= before + 1  # one that was being compiled
    assert not engine.core.grammars.slab.size


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_is_dropped_is_not_waited_for(
    tiny_config, compiled_behind, held, caplog, monkeypatch, count
):
    """Its threads end with what they had begun: none keeps the engine for another."""
    monkeypatch.setattr(programs_module.os, "cpu_count", lambda: 4 * count)
    engine = jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",))
    threads, programs = list(engine.programs._background), weakref.ref(engine.programs)
    assert all(held.begun.acquire(timeout=60) for _ in threads)
    began = time.monotonic()
    del engine
    gc.collect()
    assert time.monotonic() - began < 10
    assert programs() is None
    held.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not held.begun.acquire(blocking=False)
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
