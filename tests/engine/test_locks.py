"""What every lock is for: what two threads would do at once without it, which a table lists."""

import importlib
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from at_once import MEETING, Place, at_once
from tiny_engines import assert_idle
from tiny_grammars import tiny_tokenizer

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.host.grammars import GrammarStore
from jaxspec.lab.training import adapt
from jaxspec.lab.training.adapter import _HEADS
from jaxspec.sampling import Asked, Logprobs
from jaxspec.sampling.grammar import Grammar


@pytest.fixture(scope="module")
def engine(tiny_engines):
    """One whose head can be trained, and of which what is watched is compiled."""
    engine = tiny_engines.load("eagle3")
    update(engine)
    train(engine)
    return engine


def update(engine):
    engine.update_weights(engine.weights)


def train(engine):
    adapt(engine, engine.generate([1, 2], max_new_tokens=8, ignore_eos=True))


def update_while_it_trains(engine):
    lock = _HEADS[engine.programs].lock
    while not lock.locked():
        time.sleep(0.001)
    while lock.locked():
        update(engine)


LOCKS = {
    "core.updating, of updates": (
        ["jaxspec.engine.api.engine:plan_weight_update"],
        [update] * 2,
    ),
    "core.updating, of a head that is put back": (
        ["jaxspec.lab.training.adapter:variables", "jaxspec.engine.rounds.core:overwrite"],
        [train, update_while_it_trains],
    ),
    "core.weights_lock, of inspected steps": (
        ["jaxspec.lab.inspection:_Run", "jaxspec.engine.rounds.core:overwrite"],
        [lambda engine: jaxspec.inspect_steps(engine, [1, 2], max_new_tokens=2), update],
    ),
    "core.weights_lock, of training": (
        ["jaxspec.lab.training.adapter:_TrainedHead._present", "jaxspec.engine.rounds.core:overwrite"],
        [train, update_while_it_trains],
    ),
    "core.preparation._preparing, of requests": (
        ["jaxspec.engine.device.programs:Programs.compile"],
        [lambda engine: engine.core.preparation.prepare(Asked.of(SamplingParams(logit_bias={3: 1})))] * 2,
    ),
    "core.preparation._preparing, of scores": (
        ["jaxspec.engine.device.programs:Programs.compile"],
        [lambda engine: engine.core.preparation.prepare_scores(Logprobs.TOP, (1,))] * 2,
    ),
    "head.lock": (
        ["jaxspec.lab.training.adapter:_TrainedHead.update"],
        [train] * 2,
    ),
}
"""By lock, the functions that no two threads may be in at once, and the calls that lead there."""


@pytest.mark.parametrize("lock", LOCKS)
def test_two_threads_are_never_there_at_once(engine, monkeypatch, lock):
    names, calls = LOCKS[lock]
    place = Place()
    for asked in ("_prepared", "_scores"):  # others may have asked for the same
        monkeypatch.setattr(engine.core.preparation, asked, set())
    for name in names:
        module, _, path = name.partition(":")
        *owners, last = path.split(".")
        owner = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, last, place.watched(getattr(owner, last)))
    assert at_once(*(lambda call=call: call(engine) for call in calls)) == []
    assert place.visits
    assert place.most == 1
    assert_idle(engine)


def test_of_two_threads_one_queues_a_request(tiny_engines):
    engine = tiny_engines.load("ngram")
    place, request = Place(), engine.make_request([1, 2], SamplingParams(max_new_tokens=2))
    submit = lambda: engine.submit([request], place.watched(lambda request: lambda piece: None))  # noqa: E731
    (error,) = at_once(submit, submit)
    assert "has been queued before" in str(error)
    assert_idle(engine)


def test_a_command_that_comes_while_the_engine_is_closed_is_run_or_refused(tiny_engines, monkeypatch):
    """It is never put into the queue of a thread that has ended."""
    engine = jaxspec.load(tiny_engines.folders["target"], progress=False, batch_size=1, max_model_len=96)
    thread, place = engine._thread, Place()
    is_alive = place.watched(thread._thread.is_alive)  # asked between the check and the queue
    monkeypatch.setattr(thread, "_thread", SimpleNamespace(is_alive=is_alive))

    def close():
        while not place.visits:
            time.sleep(0.001)
        engine.close()

    assert at_once(engine.wait_idle, close) == []


def test_programs_that_threads_compile_are_all_counted():
    seen = threading.Barrier(2)

    class Counting(Programs):
        def __init__(self):
            self._changed, self.count, self.when_compiled = threading.Condition(), 2, lambda: None

        @property
        def num_uncompiled(self):
            count = self.count
            with suppress(threading.BrokenBarrierError):
                seen.wait(MEETING)
            return count

        @num_uncompiled.setter
        def num_uncompiled(self, count):
            self.count = count

    programs = Counting()
    assert at_once(programs.one_less, programs.one_less) == []
    assert programs.count == 0


def test_a_grammar_that_threads_ask_for_is_compiled_once(monkeypatch):
    place, module = Place(), importlib.import_module("jaxspec.grammar")
    monkeypatch.setattr(module, "compile_grammar", place.watched(module.compile_grammar))
    store = GrammarStore(tiny_tokenizer(), 48, (2,), None)
    ask = lambda: store.compiled(Grammar("regex", "a|b"))  # noqa: E731
    assert at_once(ask, ask) == []
    assert place.visits == 1


def test_threads_that_train_a_head_for_the_first_time_train_one(engine, monkeypatch):
    module = importlib.import_module("jaxspec.lab.training.adapter")
    module._HEADS.pop(engine.programs, None)
    place, heads = Place(), []
    monkeypatch.setattr(module, "_TrainedHead", place.watched(module._TrainedHead))
    ask = lambda: heads.append(module._head_of(engine))  # noqa: E731
    assert at_once(ask, ask) == []
    assert heads[0] is heads[1]
