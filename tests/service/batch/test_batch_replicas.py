"""Rows through engines in processes of their own, which have no model."""

import os
import queue
import re
import signal
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from fake_engine import FakeEngine

from jaxspec import ConfigError, SamplingParams
from jaxspec.service.batch import (
    Answer,
    BatchRun,
    ProcessReplica,
    ReplicaError,
    ReplicaRun,
    Row,
    RowError,
    replicas,
)

SAMPLED = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5)


def rows(count):
    """Of all kinds, some without an answer."""
    for i in range(count):
        place, text = f"in.jsonl line {i + 1}", f"w{6 + i}"
        forms = [
            Row(place, i, text),
            Row(place, f"row {i}", None, (text, "w9", "w8")),
            Row(place, i, "fail" if i % 4 else "long"),
            Row(place, i, None, (text, "fail")),
            RowError(place, "not JSON"),
        ]
        yield forms[i % 5]


def shown(ended):
    return [item.to_dict() if isinstance(item, Answer) else str(item) for item in ended]


def counts(run):
    return run.num_tokens, run.num_prompt_tokens, run.stats


def processes(*environments):
    return [partial(ProcessReplica, environment) for environment in environments]


def pids(run):
    return [replica._process.pid for replica in run._replicas.values()]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Deadly(FakeEngine):
    """Its process dies of a certain row."""

    def make_request(self, prompt, params, **options):
        if prompt == "deadly":
            print("out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().make_request(prompt, params, **options)


class SaysWhere(FakeEngine):
    """Answers with what its environment says."""

    def _answer(self, request):
        return replace(super()._answer(request), text=os.environ["JAXSPEC_TEST"])


def load_once(marker):
    """Loads an engine, and after that no more."""
    if marker.exists():
        raise MemoryError("none left")
    marker.touch()
    warnings.warn("it is old", stacklevel=1)
    return Deadly()


def refuse():
    raise ConfigError("no such model")


def test_a_replica_is_killed_and_the_answers_are_those_of_one_engine():
    alone = BatchRun(FakeEngine(), rows(100), SAMPLED)
    expected = shown(alone)
    notes = []
    load = partial(FakeEngine, seconds=0.004)
    run = ReplicaRun(load, processes({}, {}), rows(100), SAMPLED, note=notes.append)
    with closing(run):
        run.start()
        ended, (first, _) = [], pids(run)
        for item in run:
            ended.append(item)
            if len(ended) == 10:
                assert run._replicas[0].pending  # it has rows to lose
                os.kill(first, signal.SIGKILL)
    assert notes == ["replica 1 of 2 died: signal 9, Killed; its rows are answered again"]
    assert sorted(shown(ended), key=str) == sorted(expected, key=str)
    assert counts(run) == counts(alone)
    assert pids(run) == []


def test_rows_go_to_whoever_has_room_as_they_come():
    """One by one, each when the one before has its answer; the slow one keeps nobody waiting."""
    source = queue.Queue()
    source.put(Row("line 0", 0, "slow"))
    source.put(Row("line 1", 1, "w1"))
    start = processes({"JAXSPEC_TEST": "a"}, {"JAXSPEC_TEST": "b"})
    run = ReplicaRun(partial(SaysWhere, 1, seconds=0.02), start, iter(source.get, None), SAMPLED)
    with closing(run):
        run.start()
        ended, found = iter(run), []
        while len(found) < 4:
            found.append(next(ended))
            source.put(Row(f"line {len(found) + 1}", len(found) + 1, "w1"))
        started = pids(run)
        ended.close()
    assert [answer.row.id for answer in found] == [1, 2, 3, 4]
    assert {answer.generations[0].text for answer in found} == {"b"}
    assert not any(map(is_alive, started))


def test_a_replica_that_dies_again_and_again_ends_the_run_with_its_last_words(monkeypatch, tmp_path):
    """First of a row, then of being loaded."""
    monkeypatch.setattr(replicas, "MAX_DEATHS", 2)
    notes = []
    load = partial(load_once, tmp_path / "loaded")
    run = ReplicaRun(load, processes({}), [Row("line 1", 0, "deadly")], SAMPLED, note=notes.append)
    with closing(run):
        run.start()
        with pytest.raises(ReplicaError) as error:
            list(run)
    assert re.fullmatch(
        r"(?s)replica 1 says: .*test_batch_replicas.py:\d+: UserWarning: it is old\n.*", notes[0]
    )
    assert notes[1:] == [
        "replica 1 of 1 died: signal 11, Segmentation fault; its last words: out of memory; "
        "its rows are answered again"
    ]
    assert str(error.value) == (
        "replica 1 of 1 died: exit status 1; its last words: MemoryError: none left; "
        "that was 2 times in a row"
    )


def test_a_row_that_kills_every_replica_that_gets_it_ends_the_run(monkeypatch):
    """Each of them has died only once by then, and may have answered others in between."""
    monkeypatch.setattr(replicas, "MAX_DEATHS", 2)
    notes = []
    run = ReplicaRun(Deadly, processes({}, {}), [Row("line 1", 0, "deadly")], SAMPLED, note=notes.append)
    with closing(run):
        run.start()
        with pytest.raises(ReplicaError, match=r"replica \d of 2 died: .*; that was 2 times in a row"):
            list(run)
    assert run._deaths == [1, 1]
    assert len(notes) == 1


def test_what_cannot_be_loaded_is_refused_in_one_line():
    run = ReplicaRun(refuse, processes({}), [], SAMPLED)
    with closing(run), pytest.raises(ReplicaError, match=r"^no such model$"):
        run.start()
    assert pids(run) == []
