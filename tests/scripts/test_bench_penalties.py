"""scripts/bench_penalties.py."""

import json

import bench_penalties


def test_it_times_the_same_answers_in_both_ways(tiny_config, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--batch-size", "2", "--passes", "2", "--new-tokens", "6", "--drafts", "1", "--json", str(out)]
    assert bench_penalties.main([str(tiny_config), *words]) == 0
    (row,) = json.loads(out.read_text("utf-8"))["rows"]
    assert (row["batch_size"], row["differ"]) == (2, 0)
    assert all(len(row["step_seconds"][way]) == 2 for way in ("without", "with"))
    assert "batch 2: a step takes" in capsys.readouterr().out
