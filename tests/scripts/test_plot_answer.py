"""`scripts/plot_answer.py`: an answer as a picture."""

import matplotlib
import plot_answer
from matplotlib import pyplot

import jaxspec


def test_the_same_answer_is_the_same_picture(tiny_config, tiny_engine, tmp_path, monkeypatch, capsys):
    matplotlib.use("agg")
    monkeypatch.setattr(jaxspec, "load", lambda model, **options: tiny_engine)
    monkeypatch.setattr(type(tiny_engine), "close", lambda engine: None)
    pictures = []
    for name in ("one.svg", "two.svg"):
        arguments = ["w6 w7", "--model", str(tiny_config), "--max-new-tokens", "9", "--ignore-eos"]
        assert plot_answer.main([*arguments, "--output", str(tmp_path / name)]) == 0
        pictures.append((tmp_path / name).read_text("utf-8"))
    pyplot.close("all")
    assert pictures[0] == pictures[1]
    assert "<svg" in pictures[0]
    assert "9 tokens in " in capsys.readouterr().out


def test_a_bad_format_is_one_line(tiny_config, tiny_engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jaxspec, "load", lambda model, **options: tiny_engine)
    monkeypatch.setattr(type(tiny_engine), "close", lambda engine: None)
    arguments = ["w6", "--model", str(tiny_config), "--max-new-tokens", "3"]
    assert plot_answer.main([*arguments, "--output", str(tmp_path / "answer.doc")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
