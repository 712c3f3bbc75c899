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


def test_a_head_is_measured_whatever_drafter_the_configuration_has(folder, tiny_config, capsys):
    """It was not even opened beside prompt lookup or a checkpoint alone."""
    head, prompts = str(folder / "head1"), ["--prompts", str(folder / "few.jsonl"), "--temperatures", "0"]
    tables = []
    for config in (folder / "pair.toml", tiny_config, tiny_config.parent / "model"):
        assert bench_acceptance.main([str(config), *SMALL, *prompts, "--head", head]) == 0
        tables.append(capsys.readouterr().out)
    assert len(set(tables)) == 1
    for wrong in (str(folder / "absent"), str(tiny_config.parent)):
        assert bench_acceptance.main([str(tiny_config), *SMALL, *prompts, "--head", wrong]) == 2
        assert "error: " in capsys.readouterr().err


def test_what_cannot_be_written_is_named_before_anything_is_measured(folder, capsys, monkeypatch):
    monkeypatch.setattr(jaxspec, "load", lambda *a, **k: pytest.fail("loaded"))
    arguments = ["--prompts", str(folder / "few.jsonl"), "--output", str(folder / "few.jsonl" / "out.json")]
    assert bench_acceptance.main([str(folder / "pair.toml"), *SMALL, *arguments]) == 2
    assert "few.jsonl" in capsys.readouterr().err


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
    # An interval is over prompts, so that of a single one is unknown.
    assert ["to" in cell for line in table[1:] for cell in line[2:]] == 4 * [True] + 4 * [False]

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
        (["long.jsonl"], [], "no prompt leaves room for 12 new tokens"),
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
