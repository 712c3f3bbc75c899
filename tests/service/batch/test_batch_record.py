"""What a run was begun with, and what it may go on with."""

import datetime
import json
from contextlib import closing

import pytest
from output_rows import SETTINGS, ids, record, write

from jaxspec.service.batch import OutputError, OutputFile, record_path


def test_a_run_is_recorded_before_its_first_row(tmp_path):
    path = tmp_path / "out.jsonl"
    with closing(OutputFile(path, resume=False)) as file:
        file.begin(SETTINGS, {"command": "c"})
        recorded = json.loads((tmp_path / "out.jsonl.run.json").read_text("utf-8"))
    assert recorded == {"settings": {**SETTINGS, "stop": ["a"]}, "command": "c"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run.json"]


def test_the_same_settings_go_on_and_leave_the_record(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    before = record_path(path).read_bytes()
    with closing(OutputFile(path, resume=True)) as file:
        assert file.recorded["seed"] == 1
        file.begin(SETTINGS, {"command": "another"})
    assert record_path(path).read_bytes() == before


def test_the_record_lies_beside_the_file_that_is_written(tmp_path):
    """As for `--output /dev/stdout` with the shell's `> out.jsonl`."""
    link, path = tmp_path / "links" / "stdout", tmp_path / "out.jsonl"
    link.parent.mkdir()
    link.symlink_to(path)
    write(link, record(1))
    assert [file.name for file in link.parent.iterdir()] == ["stdout"]
    with closing(OutputFile(path, resume=True)) as file:
        assert file.recorded["seed"] == 1


def test_what_differs_is_named_and_force_goes_on(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    path.write_bytes(path.read_bytes() + b'{"id": "torn')
    other = {**SETTINGS, "model": "blake2b 01", "temperature": 1.0, "stop": [], "raw": True}
    del other["seed"]
    held = path.read_bytes(), record_path(path).read_bytes()
    with pytest.raises(OutputError) as refused:
        write(path, record(2), resume=True, settings=other)
    assert str(refused.value) == (
        f"cannot resume {path}: it was begun with another model, temperature 0.0 and not 1.0, "
        'stop ["a"] and not [], raw none and not true, seed 1 and not none; '
        "--resume=force continues anyway"
    )
    assert (path.read_bytes(), record_path(path).read_bytes()) == held

    assert write(path, record(2), resume=True, settings=other, force=True) == {1}
    assert ids(path) == [1, 2]
    recorded = json.loads(record_path(path).read_text("utf-8"))
    assert recorded["settings"] == other
    assert recorded["before"]["settings"]["temperature"] == 0.0
    assert write(path, resume=True, settings=other) == {1, 2}


def test_a_date_of_a_toml_file_is_recorded_as_text(tmp_path):
    path = tmp_path / "out.jsonl"
    settings = {"drafter.options": {"made": datetime.date(2026, 1, 2)}}
    write(path, record(1), settings=settings)
    assert write(path, resume=True, settings=settings) == {1}


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"settings": 3}', "[" * 100_000])
def test_rows_without_a_record_are_not_gone_on_with(tmp_path, text):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    record_path(path).unlink()
    if text is not None:
        record_path(path).write_text(text, "utf-8")
    with pytest.raises(OutputError, match=r"out\.jsonl\.run\.json does not say what it was begun with"):
        write(path, resume=True)
    assert write(path, resume=True, force=True) == {1}
    assert write(path, resume=True) == {1}


def test_without_rows_there_is_nothing_to_differ_from(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path)
    assert write(path, record(1), resume=True, settings={"model": "other"}) == set()
    assert json.loads(record_path(path).read_text("utf-8"))["settings"] == {"model": "other"}


def test_a_new_run_in_a_file_that_was_removed_forgets_the_old_record(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record(1))
    path.unlink()
    write(path, record(1), settings={"model": "other"})
    assert json.loads(record_path(path).read_text("utf-8")) == {
        "settings": {"model": "other"},
        "command": "c",
    }


def test_a_record_that_cannot_be_written_stops_the_run_before_its_first_row(tmp_path):
    path = tmp_path / "out.jsonl"
    record_path(path).mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*out\.jsonl"):
        write(path, record(1))
    assert path.read_bytes() == b""
