"""`python -m jaxspec` on the tiny model."""

import re
import subprocess
import sys

import pytest

from jaxspec import __main__ as command


@pytest.fixture
def run(monkeypatch, tiny_config, tiny_engine):
    """Runs the command over the shared engine; returns its exit status."""
    monkeypatch.setattr(command, "load", lambda model, **options: tiny_engine)
    return lambda *arguments: command.main([*arguments, "--model", str(tiny_config)])


def test_the_answer_goes_to_stdout_and_the_statistics_to_stderr(run, tiny_engine, capsys):
    assert run("w6 w7", "--max-new-tokens", "9", "--ignore-eos") == 0
    printed = capsys.readouterr()
    expected = tiny_engine.generate("w6 w7", max_new_tokens=9, ignore_eos=True)
    assert printed.out == expected.text + "\n"
    assert re.fullmatch(
        rf"\[9 tokens in \d+\.\d\d s, \d+\.\d tokens/s; {expected.stats.steps} target passes, "
        rf"acceptance length {expected.stats.acceptance_length:.2f}\]\n",
        printed.err,
    )


def test_sampling_options_reach_the_request(run, tiny_engine, capsys):
    options = ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "4"]
    assert run("w6 w7", "--raw", "--max-new-tokens", "9", "--ignore-eos", *options) == 0
    expected = tiny_engine.generate(
        "w6 w7",
        raw=True,
        max_new_tokens=9,
        ignore_eos=True,
        temperature=0.7,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        seed=4,
    )
    assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([""], "the prompt is empty"),
        (["w6", "--temperature", "-1"], "temperature must be a number, 0 or more, got -1.0"),
        (["w6", "--top-k", "many"], "argument --top-k: invalid int value: 'many' (see --help)"),
        (["w6", "--num-speculative-tokens", "2", "--no-speculation"], "not allowed with argument"),
        (["w6 " * 200], "leaves no room to answer"),
        ([], "the following arguments are required: prompt"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, problem):
    try:
        status = run(*arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert problem in error


def test_an_unknown_model_is_one_line(capsys):
    assert command.main(["hello", "--model", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: 'nothing' is no configuration")


def test_interrupting_is_no_traceback(run, monkeypatch, capsys):
    def interrupted(model, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", interrupted)
    assert run("w6") == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_reader_that_goes_away_is_no_traceback(tiny_config):
    """A process of its own: the end of a pipe cannot be had otherwise."""
    script = (
        "import sys; from jaxspec import __main__ as command; "
        "command._answer = lambda args: [print(i, flush=True) for i in range(100_000)]; "
        "sys.exit(command.main(['w6']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1
