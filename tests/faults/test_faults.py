"""Every fault of `faults.toml` still applies to the code; `run.py` runs their tests."""

import ast
import shutil
from datetime import date, timedelta

import pytest
import run
from run import HERE, ROOT, main, part_of, read_faults, table

FAULTS = read_faults()


def test_every_fault_can_be_put_in(tmp_path):
    for fault in FAULTS:
        (tmp_path / fault.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / fault.file, tmp_path / fault.file)
        before = fault.apply(tmp_path)
        after = (tmp_path / fault.file).read_text("utf-8")
        assert after != before, fault.name
        # The fault must be valid Python.
        ast.parse(after)
        with pytest.raises(ValueError, match="0 times"):
            fault.apply(tmp_path)
        assert (ROOT / fault.test).is_file(), fault.name


def test_names_are_different():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_page_is_that_of_the_list():
    assert (HERE / "README.md").read_text("utf-8") == table(FAULTS), "run tests/faults/run.py --table"


def test_nothing_chosen_is_no_success(capsys):
    assert main(["no fault has this name"]) == 1
    assert capsys.readouterr().out == "0 of 0 caught\n"


def test_the_parts_are_all_faults():
    parts = [part_of(FAULTS, f"{number}/7") for number in range(1, 8)]
    assert sorted(fault.name for part in parts for fault in part) == sorted(fault.name for fault in FAULTS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("monday", [date(2026, 3, 2), date(2026, 12, 21)])
def test_two_weeks_of_work_run_every_fault(monkeypatch, monday):
    names = set()
    for day in [*range(5), *range(7, 12)]:
        today = monday + timedelta(days=day)
        monkeypatch.setattr(
            run, "date", type("Today", (), {"today": staticmethod(lambda today=today: today)})
        )
        names |= {fault.name for fault in part_of(FAULTS, "today")}
    assert names == {fault.name for fault in FAULTS}


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "tomorrow"])
def test_a_part_that_is_none_is_refused(part, capsys):
    with pytest.raises(SystemExit):
        main(["--part", part])
    assert f"--part {part}: " in capsys.readouterr().err
