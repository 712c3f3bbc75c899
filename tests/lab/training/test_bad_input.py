"""Bad input: one line that names it, exit code 1, and nothing overwritten."""

import errno
import json
import os

import pytest
from tiny_run import TEMPLATE, write_run, write_target

from jaxspec.commands.train import main
from jaxspec.lab.training.prompt_files import read_texts
from jaxspec.lab.training.stage_folder import StageFolder, holds_a_run


def fails(capsys, config, output, *stages: str) -> str:
    """The error of the program, which must be one line."""
    arguments = [
        str(config),
        "--output",
        str(output),
        *(["--resume"] if (output / "prompts").exists() else []),
    ]
    assert main([*arguments, *(part for stage in stages for part in ("--stage", stage))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ('{"text": "hello"}', "unknown key 'text'; known: id, prompt, messages, turns, response, "),
        ('{"prompt": [7]}', "prompt must be text: training goes by words"),
        ('{"prompt": "hello", "response": 7}', "response must be a text that is not empty, or null"),
        ('{"prompt": "a", "response": "b", "answer": "c"}', "got response and answer"),
        ('{"prompt": "a", "temperature": 1}', "temperature: a training run samples every row alike"),
        ('{"turns": ["a", "b"]}', "turns: training needs the answers between them"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], '
            '"answer": "c"}',
            "has two answers",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}',
            "the answer, its last message, is empty",
        ),
        ('{"prompt": "a", "chat_template_kwargs": {"b": 1}}', "does not read 'b'"),
        (
            '{"prompt": "a", "special_tokens_as_text": true}',
            "special_tokens_as_text: a training run does not",
        ),
        ('{"messages": [{"role": "assistant", "content": "hello"}]}', "must end with a user's turn"),
        ('{"messages": [{"role": "system", "content": "hello"}]}', "must end with a user's turn"),
        ('{"prompt": "a", "response": "\\udfff"}', "response is not valid Unicode"),
        (
            '{"messages": [{"role": "critic", "content": "a"}, {"role": "user", "content": "b"}]}',
            "no critics",
        ),
    ],
)
def test_malformed_prompt(tmp_path, capsys, row, message):
    critics = "{% if messages[0]['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    write_target(tmp_path / "target", template=critics + TEMPLATE)
    config = write_run(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(row + "\n")
    error = fails(capsys, config, tmp_path / "out", "prompts")
    assert "prompts.jsonl line 49: " in error
    assert message in error


def test_a_prompt_may_hold_any_separator_of_lines_but_their_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\u2028b\u2028c\x85d"}\r\n\n{"prompt": "e"}\n', "utf-8")
    assert read_texts(path) == ["a\u2028b\u2028c\x85d", "e"]


def test_missing_prompt_file(tmp_path, capsys):
    config = write_run(tmp_path, prompts={"files": ["absent.jsonl"]})
    assert "absent.jsonl: No such file or directory" in fails(capsys, config, tmp_path / "out", "prompts")


def test_target_without_a_chat_template(tmp_path, capsys):
    write_target(tmp_path / "target", template=None)
    error = fails(capsys, write_run(tmp_path), tmp_path / "out")
    assert "needs a target with a tokenizer and a chat template" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"vocabulary": {"size": 260}},
            "between 1 and the target's vocabulary of 259",
        ),
        ({"head": {"num_layers": 0}}, "head.num_layers must be at least 1"),
        ({"head": {"capture": [1, 2, 6]}}, "head.capture must rise, from 0 to at most 5"),
        ({"train": {"lr": 1e-3}}, "unknown key train.lr"),
        ({"train": {"optimizer": "sgd"}}, "train.optimizer must be 'adamw' or 'muon'"),
        ({"train": {"objective": "kl"}}, "train.objective must be 'cross_entropy' or 'total_variation'"),
        ({"train": {"warmup_steps": 20}}, "train.warmup_steps must be below train.steps 20"),
        ({"train": {"steps": 40, "epochs": 2.0}}, "train.steps and train.epochs: give one of them"),
        (
            {"train": {"batch_size": 4, "batch_tokens": 512}},
            "train.batch_size and train.batch_tokens: give one of them",
        ),
        (
            {"train": {"steps": 0, "warmup_steps": 0, "epochs": 0.0}},
            "train.epochs must be a number above 0, got 0.0",
        ),
        ({"train": {"learning_rate": -1.0}}, "train.learning_rate must be a number above 0, got -1.0"),
        ({"evaluate": {"num_speculative_tokens": 0}}, "evaluate.num_speculative_tokens must be a whole"),
        ({"evaluate": {"temperatures": [-1.0]}}, "evaluate.temperatures: temperature must be a number"),
        ({"responses": {"temperatures": []}}, "responses.temperatures must name at least one"),
        ({"responses": {"temperatures": [-1]}}, "responses.temperatures: temperature must be a number"),
        ({"prompts": {"files": [1]}}, "prompts.files must be names of files, got 1"),
        ({"head": {"capture": ["a"]}}, "head.capture must be indices of layers, got 'a'"),
        ({"prompts": {"seed": -1}}, "prompts.seed must be a whole number of at least 0, got -1"),
        ({"prompts": {"synthetic_max_tokens": 0}}, "prompts.synthetic_max_tokens must be a whole number"),
        ({"responses": {"seed": 2**32}}, "responses.seed must be a whole number of at most 4294967295"),
        ({"train": {"num_unroll_steps": 65}}, "train.num_unroll_steps must be a whole number of at most 64"),
        (
            {"evaluate": {"num_speculative_tokens": 65}},
            "evaluate.num_speculative_tokens must be a whole number of at most 64",
        ),
        ({"head": {"intermediate_size": -1}}, "head.intermediate_size must be a whole number of at least 1"),
        ({"train": {"seed": -1}}, "train.seed must be a whole number of at least 0, got -1"),
        ({"train": {"warmup_steps": -1}}, "train.warmup_steps must be a whole number of at least 0, got -1"),
        ({"train": {"validation_rows": -8}}, "train.validation_rows must be a whole number of at least 0"),
        ({"train": {"step_decay": -0.8}}, "train.step_decay must be from 0 to below inf, got -0.8"),
        ({"train": {"beta2": 1.0}}, "train.beta2 must be from 0 to below 1, got 1.0"),
        ({"train": {"weight_decay": -0.1}}, "train.weight_decay must be from 0 to below inf, got -0.1"),
        ({"evaluate": {"seeds": [0, -1]}}, "evaluate.seeds must be a whole number of at least 0, got -1"),
        ({"evaluate": {"seeds": ["a"]}}, "evaluate.seeds must be a whole number of at least 0, got 'a'"),
        ({"export": {"data": [1]}}, "export.data must be texts, got 1"),
        ({"training": {"steps": 3}}, "unknown section [training]"),
        ({"target": {"source": "absent"}}, "absent: no such file or folder"),
    ],
)
def test_configuration(tmp_path, capsys, sections, message):
    assert message in fails(capsys, write_run(tmp_path, **sections), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--epochs", "--learning-rate"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_options_that_are_no_positive_number(tmp_path, capsys, option, value):
    config = write_run(tmp_path)
    target, prompts = str(tmp_path / "target"), str(tmp_path / "prompts.jsonl")
    assert config.exists()
    arguments = ["--target", target, "--prompts", prompts, "--output", str(tmp_path / "out"), option, value]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "must be a number above 0, got" in error
    assert not (tmp_path / "out").exists()


def test_evaluation_prompts_without_room_for_an_answer_are_named_first(tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "sun " * 500}) + "\n")
    config = write_run(tmp_path, evaluate={"files": ["long.jsonl"], "max_new_tokens": 8})
    error = fails(capsys, config, tmp_path / "out", "prompts")
    assert "long.jsonl: no prompt leaves room for 8 new tokens" in error


def test_a_stage_needs_the_ones_before_it(tmp_path, capsys):
    error = fails(capsys, write_run(tmp_path), tmp_path / "out", "responses")
    assert "the stage 'prompts' is not finished; run it first" in error


@pytest.mark.parametrize(
    ("sections", "difference"),
    [
        ({"prompts": {"seed": 1}}, "prompts.seed is 0 there and 1 here"),
        ({"engine": {"dtype": "bfloat16"}}, "engine.dtype is None there and 'bfloat16' here"),
        ({"engine": {"cache_dtype": "float16"}}, "engine.cache_dtype is None there and 'float16' here"),
    ],
)
def test_output_of_another_run(tmp_path, capsys, sections, difference):
    config = write_run(tmp_path)
    assert main([str(config), "--output", str(tmp_path / "out"), "--stage", "prompts"]) == 0
    manifest = (tmp_path / "out" / "prompts" / "stage.json").read_bytes()
    error = fails(capsys, write_run(tmp_path, **sections), tmp_path / "out", "prompts")
    assert f"belongs to another run: {difference}" in error
    assert (tmp_path / "out" / "prompts" / "stage.json").read_bytes() == manifest


def test_output_that_is_no_run(tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("chapter one")
    error = fails(capsys, write_run(tmp_path), output)
    assert "not empty, and not the output of a training run; nothing was written" in error
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]


def test_output_with_a_foreign_stage_folder(tmp_path, capsys):
    config = write_run(tmp_path)
    assert main([str(config), "--output", str(tmp_path / "out"), "--stage", "prompts"]) == 0
    (tmp_path / "out" / "train").mkdir()
    (tmp_path / "out" / "train" / "notes.txt").write_text("mine")
    assert "holds files that no run of this program wrote" in fails(capsys, config, tmp_path / "out", "train")


@pytest.mark.parametrize("left", [[], ["stage.json.part"]])
@pytest.mark.parametrize("stage", ["prompts", "responses"])
def test_a_run_that_ended_in_its_first_write_begins_again(tmp_path, left, stage):
    config = write_run(tmp_path)
    arguments = [str(config), "--output", str(tmp_path / "out")]
    if stage == "responses":
        assert main([*arguments, "--stage", "prompts"]) == 0
    folder = tmp_path / "out" / stage
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).touch()
    assert holds_a_run(tmp_path / "out") == (stage == "responses")
    StageFolder(tmp_path / "out", stage, {})
    assert json.loads((folder / "stage.json").read_text())["stage"] == stage


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in fails(capsys, write_run(tmp_path), tmp_path / "out", "prompts")


def test_reports_are_json(tmp_path, capsys):
    config = write_run(tmp_path)
    assert main([str(config), "--output", str(tmp_path / "out"), "--stage", "prompts"]) == 0
    name, _, report = capsys.readouterr().out.strip().partition(": ")
    assert (name, json.loads(report)["prompts"]) == ("prompts", 48)
