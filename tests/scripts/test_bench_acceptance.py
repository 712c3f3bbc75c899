"""`scripts/bench_acceptance.py`: acceptance of several heads on the same prompts."""

import json

import bench_acceptance
import pytest
from tiny_models import write_eagle3

import jaxspec

SMALL = ["--max-new-tokens", "12", "--batch-size", "2", "--num-speculative-tokens", "2"]


def write_prompts(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def folder(tiny_config, tmp_path_factory):
    """A configuration with an EAGLE-3 head, another head, and two sets of prompts."""
    folder = tmp_path_factory.mktemp("acceptance")
    target = tiny_config.parent / "model"
    for seed in (1, 2):
        write_eagle3(folder / f"head{seed}", target, seed=seed)
    (folder / "pair.toml").write_text(
        f'[target]\nsource = "{target}"\n[drafter]\nkind = "eagle3"\nsource = "{folder}/head1"\n', "utf-8"
    )
    write_prompts(folder / "few.jsonl", "w8 w9 w8 w9", "w10 w11 w12")
    write_prompts(folder / "one.jsonl", "w20 " * 4, "w21 " * 120)
    return folder


def test_every_head_answers_every_set_at_every_temperature(folder, capsys):
    heads = [str(folder / "head1"), str(folder / "head2")]
    arguments = [str(folder / "pair.toml"), *SMALL, "--seeds", "0", "1", "--output", str(folder / "out.json")]
    arguments += ["--prompts", str(folder / "few.jsonl"), str(folder / "one.jsonl")]
    arguments += ["--head", heads[0], "--head", heads[1]]
    assert bench_acceptance.main(arguments) == 0
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[:2] for line in table[1:]] == [
        ["| few, 2", "0"],
        ["| few, 2", "1"],
        ["| one, 1", "0"],  # the other prompt leaves no room for an answer
        ["| one, 1", "1"],
    ]
    assert ["to" in cell for line in table[1:] for cell in line[2:]] == 2 * [False, False, True, True]

    written = json.loads((folder / "out.json").read_text("utf-8"))["acceptance"]
    assert list(written) == heads
    for head, results in written.items():
        source = {"source": head, "num_speculative_tokens": 2}
        with jaxspec.load(folder / "pair.toml", drafter=source, progress=False, batch_size=2) as engine:
            turns = [[{"role": "user", "content": text}] for text in ("w8 w9 w8 w9", "w10 w11 w12")]
            answers = engine.generate(turns, max_new_tokens=12)
        result = results["few temperature 0"]
        assert result["tokens"] == sum(len(answer.token_ids) for answer in answers)
        assert result["accepted"] == sum(answer.stats.accepted for answer in answers)
        assert len(results["few temperature 1"]["acceptance_length_by_seed"]) == 2


@pytest.mark.parametrize(
    ("prompts", "head", "message"),
    [
        (["no.jsonl"], [], "no.jsonl"),
        (["long.jsonl"], [], "holds no prompt of at most 116 tokens"),
        (["few.jsonl", "few.jsonl"], [], "two files are called few"),
        (["few.jsonl"], ["--head", "no/such/head"], "no/such/head"),
    ],
)
def test_bad_input_is_one_line(folder, monkeypatch, capsys, prompts, head, message):
    monkeypatch.chdir(folder)
    write_prompts(folder / "long.jsonl", "w21 " * 120)
    assert bench_acceptance.main(["pair.toml", *SMALL, "--prompts", *prompts, *head]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
