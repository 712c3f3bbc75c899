"""scripts/bench_extraction.py."""

import json

import bench_extraction
import pytest


def test_it_counts_what_it_times(tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_extraction, "SCHEMA", {"type": "null"})
    monkeypatch.setattr(bench_extraction, "prompts", lambda: ["w6 w7", "w8", "w9"])
    monkeypatch.setattr(bench_extraction, "is_valid", lambda text: text == "null")
    words = [str(tiny_config), "--batch-size", "2", "--passes", "1", "--json", str(tmp_path / "out.json")]
    assert bench_extraction.main(words) == 0
    without, constrained = json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"]
    assert (constrained["valid"], constrained["cut"], constrained["tokens"]) == (3, 0, 6)
    assert (without["valid"], without["tokens"] > 6) == (0, True)
    assert "with a schema" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "A", "age": 3, "occupation": "b", "city": "c"}', True),
        ('{"name": "A", "age": "3", "occupation": "b", "city": "c"}', False),
        ('{"name": "A"}', False),
        ("no JSON", False),
    ],
)
def test_an_answer_is_valid_if_it_has_the_facts(text, valid):
    assert bench_extraction.is_valid(text) is valid
    assert len(set(bench_extraction.prompts())) == 50
