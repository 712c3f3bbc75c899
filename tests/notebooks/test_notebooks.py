"""Runs every notebook in this process, with the cell tagged "parameters" set for something tiny."""

import ast
import json
import re
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from jaxspec.drafters.registry import DRAFTERS

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PROMPTS = ["w6 w7", "w8 w9 w8 w9", "w10"]
PARAMETERS = {
    "speculation": {
        "PROMPTS": PROMPTS,
        "MAX_NEW_TOKENS": 12,
        "TEXT": PROMPTS[0],
        "SCHEMA": {"type": "null"},
    },
    "look_inside_one_step": {"PROMPT": PROMPTS[1], "MAX_NEW_TOKENS": 24},
    "write_your_own_drafter": {"PROMPTS": PROMPTS[:2], "MAX_NEW_TOKENS": 24, "SAMPLES": 600},
    "train_a_head": {"UPDATES": 8, "PROMPTS": 24},
    "sample_reward_update": {"UPDATES": 4, "SAMPLES": 2},
    "evaluate": {"MAX_GEN_TOKS": 8},
}
"""What makes each notebook small; of those with a MODEL, it is the tiny configuration."""
MADE_THERE = ("train_a_head", "sample_reward_update")
"""Notebooks that make their model themselves."""
NEEDED = {"evaluate": "lm_eval"}
"""Packages that a notebook needs beside those of the extras `dev` and `notebooks`."""


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def is_parameters(cell):
    return "parameters" in cell["metadata"].get("tags", [])


def run(source, name, namespace):
    """Runs a cell; returns the value of a last line that is an expression and does not end in a semicolon."""
    tree = ast.parse(source, name)
    shown = None
    if isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        shown = ast.Expression(tree.body.pop().value)
    exec(compile(tree, name, "exec"), namespace)
    return None if shown is None else eval(compile(shown, name, "eval"), namespace)


@pytest.fixture
def parameters(tiny_config):
    def of(name):
        model = {} if name in MADE_THERE else {"MODEL": str(tiny_config)}
        return model | PARAMETERS[name]

    registered = dict(DRAFTERS)
    before = matplotlib.get_backend()
    pyplot.close("all")  # what another file of tests left open
    pyplot.switch_backend("svg")
    yield of
    # Who takes the notebook's own backend away takes its pictures away.
    assert matplotlib.get_backend() == "svg"
    pyplot.switch_backend(before)
    pyplot.close("all")
    for name in DRAFTERS.keys() - registered.keys():
        DRAFTERS.pop(name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, parameters, capsys):
    """And every cell shows something, or nothing, as it did when it was stored."""
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem], reason=f"needs {NEEDED[path.stem]}")
    namespace = {"__name__": "__main__"}
    for cell in code_cells(path):
        value = run("".join(cell["source"]), path.name, namespace)
        if is_parameters(cell):
            given = parameters(path.stem)
            assert set(namespace) - {"__builtins__", "__name__"} == set(given)
            namespace.update(given)
        stored = {output["output_type"] for output in cell["outputs"]}
        shown = {
            "stream": bool(capsys.readouterr().out),
            "execute_result": value is not None,
            "display_data": bool(pyplot.get_fignums()),
        }
        assert stored == {kind for kind, is_there in shown.items() if is_there}
        if value is not None:
            assert value._repr_html_()
        pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(map(is_parameters, cells)) == 1
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_small_and_of_no_machine(path):
    text = path.read_text("utf-8")
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|tmp|usr|Users|work)/|site-packages", text)


def test_every_notebook_is_run_and_described():
    assert {path.stem for path in NOTEBOOKS} == set(PARAMETERS)
    page = (FOLDER.parent / "docs" / "experiments.md").read_text("utf-8")
    for path in NOTEBOOKS:
        assert f"`{path.name}`" in page
