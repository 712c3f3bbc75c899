import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from output_rows import SETTINGS, ids, record, write

from jaxspec.service.batch import OutputError, OutputFile, output, record_path


def test_a_row_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    path = tmp_path / "out.jsonl"
    with closing(OutputFile(path, resume=False)) as file:
        file.begin(SETTINGS, {})
        file.append(record(1))
        assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [record(1)]


def test_rows_are_forced_to_the_disk_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    synced, now = [], [0.0]
    monkeypatch.setattr(output.os, "fsync", synced.append)
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    file = OutputFile(tmp_path / "out.jsonl", resume=False)
    file.begin(SETTINGS, {})
    synced.clear()
    counts = []
    for row_id, now[0] in enumerate([1.0, 4.9, 5.0, 6.0, 9.9, 10.1]):
        file.append(record(row_id))
        counts.append(len(synced))
    assert counts == [0, 0, 1, 1, 1, 2]
    file.close()
    assert len(synced) == 3


def test_resuming_finds_what_is_finished_and_appends(tmp_path):
    path = tmp_path / "out.jsonl"
    assert write(path, record(1), record("b")) == set()
    assert write(path, record(3), resume=True) == {1, "b"}
    assert ids(path) == [1, "b", 3]


@pytest.mark.parametrize("kept", [*range(1, 12), -2, -1, None])
def test_a_torn_last_row_is_removed_wherever_it_was_cut(tmp_path, kept):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(record(2), ensure_ascii=False).encode()[:kept])
    assert write(path, resume=True) == {1}
    assert path.read_bytes() == whole


def test_a_torn_first_row_is_removed_too(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path)
    for torn in (b'{"id": 1, "tex', b"{", b"\0\0\0"):
        path.write_bytes(torn)
        assert write(path, record(2), resume=True) == set()
        assert ids(path) == [2]


def test_resuming_without_a_file_starts_one(tmp_path):
    assert write(tmp_path / "out.jsonl", resume=True) == set()


def test_a_file_with_rows_needs_resume(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"out\.jsonl exists: give --resume"):
        OutputFile(path, resume=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        "notes",
        "[]",
        '{"id": 1}',
        '{"token_ids": []}',
        '{"id": [], "token_ids": []}',
        '{"id": 2, "token_ids": [], "input_digest": 7}',
        '{"id": 2, "token_ids": [], "input_digest": "xyz"}',
        '{"id": 2, "token_ids": [], "input_digest": "' + "f" * 17 + '"}',
        "[" * 100_000,
    ],
)
def test_a_file_of_something_else_is_not_resumed(tmp_path, line):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    path.write_text(path.read_text("utf-8") + line + "\ntorn", "utf-8")
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"out\.jsonl line 2 is no output row"):
        OutputFile(path, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("force", [False, True])
def test_a_line_of_something_else_is_not_taken_for_a_torn_row(tmp_path, force):
    path = tmp_path / "notes.txt"
    path.write_text("my only copy", "utf-8")
    with (
        pytest.raises(OutputError, match=r"is no output row|does not say"),
        closing(OutputFile(path, resume=True)) as file,
    ):
        file.begin(SETTINGS, {}, force=force)
    assert path.read_text("utf-8") == "my only copy"


def test_an_id_that_stands_twice_is_not_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1), record(2), record(1))
    with pytest.raises(OutputError, match="line 3 is the second with id 1"):
        OutputFile(path, resume=True)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path / "missing" / "out.jsonl", tmp_path):
        with pytest.raises(OutputError, match=f"cannot write {path}: "):
            OutputFile(path, resume=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_full_disk_is_one_line():
    full = pytest.raises(OutputError, match="cannot write /dev/full: No space left on device")
    with closing(OutputFile(Path("/dev/full"), resume=False)) as file, full:
        file.begin(SETTINGS, {})
        file.append(record(1))
    assert not record_path(Path("/dev/full")).exists()


def test_a_pipe_takes_rows_and_cannot_be_resumed(tmp_path):
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{writing}")
    with closing(OutputFile(path, resume=False)) as file:
        file.begin(SETTINGS, {})
        file.append(record(1))
        file.append(record(2))
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert [json.loads(line)["id"] for line in pipe] == [1, 2]
    with pytest.raises(OutputError, match="/dev/null is not a regular file: there is nothing to resume"):
        OutputFile(Path("/dev/null"), resume=True)


def test_the_second_run_on_a_file_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    with closing(OutputFile(path, resume=False)) as file:
        file.begin(SETTINGS, {})
        file.append(record(1))
        for name in ("out.jsonl", "link.jsonl"):
            for resume in (False, True):
                with pytest.raises(OutputError, match=f"{name}: another run is writing it"):
                    OutputFile(tmp_path / name, resume=resume)
        assert ids(path) == [1]
    assert write(path, resume=True) == {1}


def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    path = tmp_path / "out.jsonl"
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(OutputError, match="another run is writing it"):
            OutputFile(path, resume=True)
        other.kill()
    assert write(path, record(1), resume=True) == set()


def test_a_refused_file_is_let_go(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    with pytest.raises(OutputError, match="exists"):
        OutputFile(path, resume=False)
    assert write(path, resume=True) == {1}


def test_where_nothing_can_be_locked_there_is_a_warning(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(output.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"out\.jsonl cannot be locked \(Function not implemented\)"):
        write(tmp_path / "out.jsonl", record(1))
    assert ids(tmp_path / "out.jsonl") == [1]
