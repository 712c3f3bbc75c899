import json
from dataclasses import replace

import compare_greedy
import pytest

import jaxspec

PROMPTS = ["w6 w7 w8", "w9", "w10 w11 w10 w11"]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), "utf-8")
    return path


def test_answers_with_and_without_drafts_are_the_same(tiny_config, prompts_file, tmp_path, capsys):
    result = tmp_path / "result.json"
    options = ["--input", str(prompts_file), "--max-new-tokens", "12", "--batch-size", "1,3"]
    assert compare_greedy.main([str(tiny_config), *options, "--json", str(result)]) == 0
    assert "batch 3: 3 of 3 answers identical, 36 tokens" in capsys.readouterr().out
    rows = json.loads(result.read_text())["rows"]
    assert [(row["batch_size"], row["identical"], row["parts"]) for row in rows] == [(1, 3, []), (3, 3, [])]


def test_a_difference_is_found_with_the_targets_margin(tiny_config):
    engine = jaxspec.load(tiny_config, drafter={"kind": "none"}, sampling_modes=("greedy",), progress=False)
    target = compare_greedy.load(str(tiny_config), "float32")
    answer = engine.generate(PROMPTS[0], max_new_tokens=6)
    wrong = replace(answer, token_ids=[*answer.token_ids[:4], 1 + answer.token_ids[4] % 100])
    found = compare_greedy.compare(target, [answer], [wrong])
    assert found["identical"] == 0
    (part,) = found["parts"]
    assert part["token"] == 4
    assert part["margin"] > 0


def test_a_file_that_is_not_there_is_one_line(tiny_config, tmp_path, capsys):
    assert compare_greedy.main([str(tiny_config), "--input", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
