import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_step


def test_times_a_tiny_model_and_writes_where_it_comes_from(tmp_path):
    file = tmp_path / "result.json"
    options = "--shape tiny --k 1 --acceptance 1.5 --batch 2 --new-tokens 6 --steps-per-dispatch 2 --runs 1"
    sizes = "--max-model-len 64 --context 9 --copy-bytes 4096 --dtype float32"
    assert bench_step.main([*options.split(), *sizes.split(), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert 1 <= row["tokens_per_step"] <= 2
    assert row["step_ms"] > 0
    assert row["dispatches_per_step"] == 0.5
    assert "--shape tiny" in result["command"]
    assert {"git_revision", "versions", "device"} <= result.keys()
