"""The batch script, in this process and on the tiny model."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from jaxspec.sampling import SamplingMode

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_batch", SCRIPTS / "generate_batch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, tmp_path, tiny_config):
    """Runs the script over lines of input, writing to out.jsonl; returns its exit status."""

    def start(*options, lines=(), config=tiny_config):
        if lines:
            (tmp_path / "in.jsonl").write_text("\n".join(lines), "utf-8")
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        return script.main([str(config), *files, *options])

    return start


@pytest.fixture
def loaded(script, monkeypatch, tiny_engine):
    """Lets the script have the shared engine instead of compiling one; holds what it asked for."""
    asked = []

    def load(config, **options):
        asked.append(options)
        return tiny_engine

    monkeypatch.setattr(script, "load", load)
    return asked


@pytest.fixture
def never_loads(script, monkeypatch):
    def load(*args, **options):
        raise AssertionError("loaded a model")

    monkeypatch.setattr(script, "load", load)


def output(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]


LINES = [
    '{"prompt": "w6 w7 w8"}',
    '{"id": "chat", "messages": [{"role": "user", "content": "w9"}]}',
    '{"id": "turns", "turns": ["w10", "w11"]}',
    '{"id": "ids", "prompt": [12, 13]}',
]


def test_from_nothing_to_answers_and_a_summary(run, tmp_path, capsys):
    """The one test here that loads and compiles as a user's run does."""
    summary_path = tmp_path / "summary.json"
    options = ["--max-new-tokens", "6", "--num-speculative-tokens", "2", "--summary", str(summary_path)]
    assert run(*options, "--ignore-eos", lines=LINES) == 0
    rows = {row["id"]: row for row in output(tmp_path)}
    assert set(rows) == {0, "chat", "turns", "ids"}
    assert all(len(row["token_ids"]) == 6 and row["finish_reason"] == "length" for row in rows.values())
    assert rows[0]["text"]
    assert rows["ids"]["prompt_tokens"] == 2
    assert len(rows["turns"]["turns"]) == 2
    assert len(rows[0]["stats"]["acceptance_per_position"]) in (0, 2)

    summary = json.loads(summary_path.read_text("utf-8"))
    assert (summary["rows"], summary["rows_failed"], summary["tokens"]) == (4, 0, 5 * 6)
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])
    assert summary["config"].endswith("tiny.toml")
    assert summary["command"].startswith("scripts/generate_batch.py ")
    assert summary["versions"]["jax"] == jax.__version__
    assert "CPU" in summary["device"]
    printed = capsys.readouterr()
    assert f"tokens/s                {summary['tokens_per_second']:.1f}" in printed.out
    assert "mean acceptance length" in printed.out
    assert "4/4" in printed.err
    assert re.search(r"[\d.]+ tokens/s, acceptance length \d\.\d\d", printed.err)


def test_the_chat_template_applies_unless_raw(run, loaded, tmp_path):
    for option, count in [((), 5), (("--raw",), 3)]:
        assert run("--max-new-tokens", "1", *option, lines=['{"prompt": "w6 w7 w8"}']) == 0
        assert output(tmp_path)[0]["prompt_tokens"] == count
        (tmp_path / "out.jsonl").unlink()


def test_what_the_options_ask_of_load(run, loaded, tmp_path):
    for option in [("--no-speculation",), ("--num-speculative-tokens", "1"), ("--batch-size", "2"), ()]:
        assert run("--max-new-tokens", "1", *option, lines=LINES[:3]) == 0
        (tmp_path / "out.jsonl").unlink()
    run("--max-new-tokens", "1", "--temperature", "1")
    assert [(asked["drafter"], asked["batch_size"]) for asked in loaded] == [
        ({"kind": "none"}, 3),
        ({"num_speculative_tokens": 1}, 3),
        ({}, 2),
        ({}, 3),
        ({}, 3),
    ]
    modes = [SamplingMode.GREEDY] * 4 + [SamplingMode.TEMPERATURE]
    assert [asked["sampling_modes"] for asked in loaded] == [(mode,) for mode in modes]


def test_stop_strings_and_limit(run, loaded, tmp_path):
    assert run("--max-new-tokens", "6", "--ignore-eos", "--limit", "2", lines=LINES) == 0
    whole = {row["id"]: row["text"] for row in output(tmp_path)}
    assert set(whole) == {0, "chat"}
    (tmp_path / "out.jsonl").unlink()
    third = whole[0].split()[2]
    assert run("--max-new-tokens", "6", "--ignore-eos", "--limit", "1", "--stop", third) == 0
    (row,) = output(tmp_path)
    assert row["finish_reason"] == "stop"
    assert row["text"] == whole[0][: whole[0].index(third)]


def test_a_malformed_row_is_reported_and_the_rest_done(run, loaded, tmp_path, capsys):
    lines = ['{"prompt": "w6"}', "{", '{"prompt": [500]}', '{"prompt": "w7"}', '{"id": 0, "prompt": "w8"}']
    assert run("--max-new-tokens", "2", lines=lines) == 1
    assert {row["id"] for row in output(tmp_path)} == {0, 3}
    printed = capsys.readouterr()
    errors = [line for line in printed.err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert [re.search(r"line \d", error)[0] for error in errors] == ["line 2", "line 5", "line 3"]
    assert "2 (3 failed, 0 done before)" in printed.out


def test_resuming_gives_what_an_uninterrupted_run_gives(run, loaded, tmp_path, script, monkeypatch, capsys):
    lines = [f'{{"prompt": "w{i} w7"}}' for i in range(10, 22)]
    options = ["--max-new-tokens", "6", "--temperature", "1", "--seed", "3"]
    assert run(*options, lines=lines) == 0
    whole = {row["id"]: row["token_ids"] for row in output(tmp_path)}
    (tmp_path / "out.jsonl").unlink()

    append = script.OutputFile.append
    with monkeypatch.context() as patch:

        def interrupted(self, record):
            append(self, record)
            if len(output(tmp_path)) == 5:
                raise KeyboardInterrupt

        patch.setattr(script.OutputFile, "append", interrupted)
        assert run(*options) == 130
    assert "--resume" in capsys.readouterr().err
    finished = output(tmp_path)
    assert len(finished) == 5
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"id": 11, "text": "torn')

    assert run(*options, "--resume") == 0
    rows = output(tmp_path)
    assert rows[:5] == finished
    assert {row["id"]: row["token_ids"] for row in rows} == whole
    assert len(rows) == 12
    assert "7 (0 failed, 5 done before)" in capsys.readouterr().out

    assert run(*options, "--resume") == 0
    assert output(tmp_path) == rows
    assert "nothing to do" in capsys.readouterr().err
    assert len(loaded) == 3


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--temperature", "-1"], "temperature must be a number, 0 or more, got -1.0"),
        (["--top-p", "0"], "top_p must be a number, above 0 and at most 1, got 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be an integer, 1 or more, got 0"),
        (["--max-new-tokens", "many"], "argument --max-new-tokens: invalid int value: 'many' (see --help)"),
        (["--seed", "-1"], "seed must be an integer, 0 to 2**64 - 1, got -1"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--no-speculation", "--num-speculative-tokens", "2"], "not allowed with argument"),
        (["--input", "missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["--summary", "missing/s.json"], "cannot write missing/s.json: No such file or directory"),
        (["--output", "missing/out.jsonl"], "cannot write missing/out.jsonl: No such file or directory"),
        (
            ["--output", "full.jsonl"],
            "full.jsonl exists: give --resume to go on with it, or another --output",
        ),
        (["--output", "full.jsonl", "--resume"], "full.jsonl line 1 is no output row"),
        (["--summary", "full.jsonl", "--output", "full.jsonl"], "must be different files"),
        (["--input", "empty.jsonl"], "empty.jsonl holds no rows"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(
    run, tmp_path, monkeypatch, capsys, options, problem
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full.jsonl").write_text("notes\n", "utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", "utf-8")
    try:
        status = run(*options, lines=LINES)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert problem in printed.err
    assert (tmp_path / "full.jsonl").read_text("utf-8") == "notes\n"


@pytest.mark.parametrize(
    ("config", "options", "problem"),
    [
        ("nothing", [], "'nothing' is no configuration"),
        ("missing.toml", [], "configuration file not found: missing.toml"),
        (None, ["--batch-size", "0"], "engine.batch_size must be a whole number of at least 1, got 0"),
        (None, ["--num-speculative-tokens", "0"], "drafter.num_speculative_tokens must be a whole number"),
        ("model", ["--num-speculative-tokens", "2"], "--num-speculative-tokens: model has no drafter"),
    ],
)
def test_a_bad_configuration_is_one_line(run, tiny_config, capsys, config, options, problem):
    if config == "model":
        config = tiny_config.parent / "model"
    assert run(*options, lines=LINES, config=config or tiny_config) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1


def test_all_rows_malformed(run, never_loads, capsys):
    assert run(lines=["{", "]"]) == 1
    assert capsys.readouterr().err.count("error: ") == 2
