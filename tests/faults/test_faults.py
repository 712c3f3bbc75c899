"""Every fault of `faults.toml` still applies to the code; `run.py` runs their tests."""

import ast
import shutil

import pytest
from run import HERE, ROOT, main, read_faults, table

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_put_in(fault, tmp_path):
    (tmp_path / fault.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, tmp_path / fault.file)
    before = fault.apply(tmp_path)
    after = (tmp_path / fault.file).read_text("utf-8")
    assert after != before
    # The fault must be valid Python.
    ast.parse(after)
    with pytest.raises(ValueError, match="0 times"):
        fault.apply(tmp_path)
    assert (ROOT / fault.test).is_file()


def test_names_are_different():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_page_is_that_of_the_list():
    assert (HERE / "README.md").read_text("utf-8") == table(FAULTS), "run tests/faults/run.py --table"


def test_nothing_chosen_is_no_success(capsys):
    assert main(["no fault has this name"]) == 1
    assert capsys.readouterr().out == "0 of 0 caught\n"
