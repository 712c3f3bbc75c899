import json

import bench_logprobs

SIZES = "--shape tiny --k 1 --batch 1,2 --acceptance 1.5 --context 9 --new-tokens 6 --dtype float32 --runs 1"


def test_times_everything_on_a_tiny_model(tmp_path):
    file = tmp_path / "result.json"
    options = [*SIZES.split(), "--texts", "2", "--length", "40", "--json", str(file)]
    assert bench_logprobs.main(options) == 0
    result = json.loads(file.read_text())
    assert [(row["batch"], row["logprobs"]) for row in result["steps"]] == [
        (batch, logprobs) for batch in (1, 2) for logprobs in (None, 0, 20)
    ]
    assert all(row["step_ms"] > 0 for row in result["steps"])
    assert min(result[name] for name in ("read_ms", "score_ms", "score_top_20_ms", "update_ms")) > 0
