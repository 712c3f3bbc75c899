"""scripts/bench_extraction.py."""

import json

import bench_extraction
import pytest


def test_it_counts_what_it_times(tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_extraction, "SCHEMA", {"type": "null"})
    monkeypatch.setattr(bench_extraction, "prompts", lambda: ["w6 w7", "w8", "w9"])
    monkeypatch.setattr(bench_extraction, "is_valid", lambda text: text == "null")
    out = tmp_path / "out.json"
    words = ["--batch-size", "2", "1", "--passes", "1", "--json", str(out)]
    assert bench_extraction.main([str(tiny_config), *words]) == 0
    rows = json.loads(out.read_text("utf-8"))["rows"]
    for without, constrained, slots in ((*rows[:2], 2), (*rows[2:], 1)):
        assert without["batch_size"] == constrained["batch_size"] == slots
        assert (constrained["valid"], constrained["cut"], constrained["tokens"]) == (3, 0, 6)
        assert (without["valid"], without["tokens"] > 6) == (0, True)
    printed = capsys.readouterr().out
    assert "with a schema" in printed
    assert printed.count("an answer is") == 2


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
