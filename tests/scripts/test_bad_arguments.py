"""Bad arguments of scripts: a line that names them, exit status 2, and nothing is loaded or timed."""

import bench_acceptance
import bench_kernels
import bench_load
import bench_step
import check_devices
import compare_activations
import compare_greedy
import compare_modes
import plot_acceptance
import profile_step
import pytest

import jaxspec
from jaxspec.__main__ import main as jaxspec_main
from jaxspec.commands import bench as bench_generate
from jaxspec.commands import inspect as inspect_head
from jaxspec.commands.train import main as train_main

WITH_PROMPTS = [bench_generate, compare_greedy, compare_modes, plot_acceptance]


@pytest.fixture
def refused(tiny_config, tmp_path, monkeypatch, capsys):
    """Runs a script in a folder with a file of one prompt and one of none; returns what it says."""
    (tmp_path / "one.jsonl").write_text('{"prompt": "w6 w7"}\n', "utf-8")
    (tmp_path / "none.jsonl").write_text("\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxspec, "load", lambda *args, **settings: pytest.fail("loaded"))

    def run(script, *arguments):
        try:
            status = script.main([str(tiny_config), *arguments])
        except SystemExit as exit_:
            status = exit_.code
        said = capsys.readouterr().err
        assert status == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    return run


@pytest.mark.parametrize("script", WITH_PROMPTS, ids=lambda script: script.__name__)
def test_no_prompts(script, refused):
    assert "none.jsonl holds no rows" in refused(script, "--input", "none.jsonl")
    for limit in ("0", "-1"):
        said = refused(script, "--input", "one.jsonl", "--limit", limit)
        assert f"--limit must be at least 1, got {limit}" in said


@pytest.mark.parametrize(
    ("script", "option"),
    [
        (bench_generate, "--output"),
        (compare_activations, "--json"),
        (compare_greedy, "--json"),
        (compare_modes, "--json"),
    ],
)
def test_what_cannot_be_written_is_named_before_anything_is_answered(script, option, refused):
    assert "one.jsonl" in refused(script, "--input", "one.jsonl", option, "one.jsonl/result.json")


def test_an_answer_without_a_step_has_no_time_per_step(refused):
    assert "--max-new-tokens must be at least 2, got 1" in refused(compare_modes, "--max-new-tokens", "1")


@pytest.mark.parametrize("option", ["--temperatures", "--max-new-tokens", "--num-speculative-tokens"])
def test_acceptance_that_cannot_be_measured(option, refused):
    name = option[2:].replace("-", "_")
    assert f"evaluate.{name}" in refused(bench_acceptance, "--prompts", "one.jsonl", option, "-1")


def test_a_folder_cannot_be_imported(refused, tmp_path):
    assert "--import .: can't find '__main__' module" in refused(plot_acceptance, "--import", ".")


def test_names_that_are_not_known(capsys):
    assert bench_kernels.main(["--op", "nothing"]) == 2
    assert "--op: 'nothing' is unknown; known: rope_kv_write, " in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        check_devices.main(["--only", "llama, eagle3; nothing"])
    assert left.value.code == 2
    assert "--only: unknown case 'nothing'; known: llama, eagle3; " in capsys.readouterr().err


SHAPE = ("--shape", "smollm2-135m")


@pytest.mark.parametrize(
    ("main", "arguments", "option"),
    [
        (bench_load.main, [*SHAPE, "--limit", "3"], "--limit"),
        (bench_load.main, [*SHAPE, "--max-new-tokens", "3"], "--max-new-tokens"),
        (bench_load.main, [*SHAPE, "--input", "a.jsonl", "--scale", "2"], "--scale"),
        (bench_load.main, [*SHAPE, "--top-p", "0.5"], "--top-p"),
        (bench_step.main, [*SHAPE, "--top-k", "5"], "--top-k"),
        (bench_step.main, [*SHAPE, "--no-speculation", "--k", "3"], "--k"),
        (profile_step.main, [*SHAPE, "--no-speculation", "--acceptance", "2"], "--acceptance"),
        (plot_acceptance.main, ["a.json", "--temperature", "1"], "--temperature"),
        (inspect_head.main, ["smollm2-135m-eagle3", "--sha256", "0" * 64], "--sha256"),
        (jaxspec_main, ["hi", "--no-speculation", "--drafter", "a"], "--drafter"),
        (jaxspec_main, ["hi", "--top-p", "0.5"], "--top-p"),
        (train_main, ["--target", "a", "--prompts", "b", "--output", "c", "--data", "d"], "--data"),
        (train_main, ["--target", "a", "--output", "c", "--steps", "3", "--epochs", "1"], "--epochs"),
    ],
)
def test_an_option_without_effect_is_one_line(main, arguments, option, capsys):
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {option} has no effect ")
    assert said.count("\n") == 1
