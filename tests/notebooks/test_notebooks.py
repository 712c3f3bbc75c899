"""Runs every notebook in this process, with the cell tagged "parameters" set for the tiny model."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def is_parameters(cell):
    return "parameters" in cell["metadata"].get("tags", [])


@pytest.fixture
def tiny_parameters(tiny_config):
    return {"MODEL": str(tiny_config), "PROMPTS": ["w6 w7", "w8 w9 w8 w9", "w10"], "MAX_NEW_TOKENS": 12}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tiny_parameters, capsys):
    namespace = {}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), namespace)
        if is_parameters(cell):
            assert set(namespace) - {"__builtins__"} == set(tiny_parameters)
            namespace.update(tiny_parameters)
        assert bool(capsys.readouterr().out) == bool(cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(map(is_parameters, cells)) == 1
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream"}


def test_there_are_notebooks():
    assert NOTEBOOKS
