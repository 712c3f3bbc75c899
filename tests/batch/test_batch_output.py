import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from jaxspec.batch import OutputError, OutputFile


def row(row_id, text="é"):
    return {"id": row_id, "text": text, "token_ids": [1]}


def write(path, *rows, resume=False):
    with closing(OutputFile(path, resume=resume)) as output:
        for values in rows:
            output.append(values)
        return output.finished


def test_a_row_is_on_disk_as_soon_as_it_is_appended(tmp_path):
    path = tmp_path / "out.jsonl"
    with closing(OutputFile(path, resume=False)) as output:
        output.append(row(1))
        assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [row(1)]


def test_resuming_finds_what_is_finished_and_appends(tmp_path):
    path = tmp_path / "out.jsonl"
    assert write(path, row(1), row("b")) == set()
    assert write(path, row(3), resume=True) == {1, "b"}
    assert [json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()] == [1, "b", 3]


@pytest.mark.parametrize("kept", range(1, len(json.dumps(row(2), ensure_ascii=False).encode()) + 1))
def test_a_torn_last_row_is_removed_wherever_it_was_cut(tmp_path, kept):
    path = tmp_path / "out.jsonl"
    write(path, row(1))
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(row(2), ensure_ascii=False).encode()[:kept])
    assert write(path, resume=True) == {1}
    assert path.read_bytes() == whole


def test_resuming_without_a_file_starts_one(tmp_path):
    assert write(tmp_path / "out.jsonl", resume=True) == set()


def test_a_file_with_rows_needs_resume(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, row(1))
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"out\.jsonl exists: give --resume"):
        OutputFile(path, resume=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line", ["notes", "[]", '{"id": 1}', '{"token_ids": []}', '{"id": [], "token_ids": []}']
)
def test_a_file_of_something_else_is_not_resumed(tmp_path, line):
    path = tmp_path / "out.jsonl"
    write(path, row(1))
    path.write_text(path.read_text("utf-8") + line + "\ntorn", "utf-8")
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"out\.jsonl line 2 is no output row"):
        OutputFile(path, resume=True)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path / "missing" / "out.jsonl", tmp_path):
        with pytest.raises(OutputError, match=f"cannot write {path}: "):
            OutputFile(path, resume=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_full_disk_is_one_line():
    full = pytest.raises(OutputError, match="cannot write /dev/full: No space left on device")
    with closing(OutputFile(Path("/dev/full"), resume=False)) as output, full:
        output.append(row(1))
