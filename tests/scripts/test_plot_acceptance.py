"""`scripts/plot_acceptance.py`: a picture of configurations and of benchmarks' JSON."""

import json
from pathlib import Path

import matplotlib
import plot_acceptance
import pytest
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def figures():
    matplotlib.use("agg")
    yield
    pyplot.close("all")


def test_what_is_loaded_and_what_was_written(tiny_config, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w8 w9 w8 w9"}\n' * 3, "utf-8")
    written = {"acceptance_length": 1.75, "acceptance_per_position": [0.5, 0.25]}
    (tmp_path / "bench.json").write_text(json.dumps(written), "utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = [str(tiny_config), "bench.json", "--input", "prompts.jsonl", "--limit", "2"]
    assert plot_acceptance.main([*arguments, "--max-new-tokens", "12", "--output", "plot.png"]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    loaded, bench, where = capsys.readouterr().out.splitlines()
    assert loaded.startswith(f"{tiny_config}: ")
    assert bench == "bench: 1.75 tokens a step; per position 0.50 0.25"
    assert where == "plot.png"
    labels = [text.get_text() for text in pyplot.gca().get_legend().get_texts()]
    assert labels == [str(tiny_config), "bench"]


@pytest.mark.parametrize("name", ["no/such.json", "nothing-like-it", "bad.json", "named.json"])
def test_bad_input(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "bad.json").write_text('{"rows": []}', "utf-8")
    (tmp_path / "named.json").write_text('{"one": {"acceptance_per_position": [0.5]}}', "utf-8")
    monkeypatch.chdir(tmp_path)
    assert plot_acceptance.main([name]) != 0
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "acceptance.png").exists()


def test_the_readme_shows_the_command():
    assert "scripts/plot_acceptance.py" in (ROOT / "README.md").read_text("utf-8")
