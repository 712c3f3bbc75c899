import json
from pathlib import Path

import bench_training
import pytest

CONFIG = """
[target]
source = {source}
[prompts]
files = ["unused.jsonl"]
[vocabulary]
size = 32
[head]
capture = [1, 2, 3]
[train]
steps = 100
warmup_steps = 10
batch_size = 2
row_length = 64
num_unroll_steps = 2
validation_rows = 0
"""


@pytest.fixture
def ask(tiny_config, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(source=json.dumps(str(tiny_config.parent / "model"))), "utf-8")
    return [str(file), "--prompt-tokens", "12", "--answer-tokens", "6", "--updates", "2"]


def test_the_throughput_follows_from_the_time_of_an_update(ask, tmp_path, capsys):
    file = tmp_path / "result.json"
    assert bench_training.main([*ask, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["tokens_per_second"] == pytest.approx(2 * 64 / result["update_ms"] * 1e3)
    assert 0.5 < result["filled"] <= 1
    assert "an update of 2 rows of 64 tokens" in capsys.readouterr().out


def test_a_profile_needs_a_gpu(ask, capsys):
    assert bench_training.main([*ask, "--profile", "5"]) == 2
    assert "no GPU work in the trace" in capsys.readouterr().err


def test_sizes_are_not_chosen(ask, capsys):
    file = Path(ask[0])
    file.write_text(file.read_text().replace("row_length = 64", ""), "utf-8")
    assert bench_training.main(ask) == 2
    assert "needs train.row_length" in capsys.readouterr().err


def test_what_cannot_be_read_is_one_line(capsys):
    assert bench_training.main(["no-such-file.toml"]) == 2
    assert capsys.readouterr().err == "error: no-such-file.toml: no such file or folder\n"
