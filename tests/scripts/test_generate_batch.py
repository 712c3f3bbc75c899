"""`jaxspec batch`, in this process and on the tiny model."""

import io
import json
import os
import re
import shutil
import sys
import termios
import threading
from contextlib import closing

import jax
import pytest
from fake_engine import FakeEngine

from jaxspec.commands import batch, batch_job
from jaxspec.sampling import SamplingMode
from jaxspec.service.batch import MAX_FAILURES, HostDevices, OutputFile, row_seed


@pytest.fixture
def run(tmp_path, tiny_config):
    """Runs the command over lines of input, writing to out.jsonl; returns its exit status."""

    def start(*options, lines=(), config=tiny_config):
        if lines:
            (tmp_path / "in.jsonl").write_text("\n".join(lines), "utf-8")
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        return batch.main([str(config), *files, *options])

    return start


@pytest.fixture
def loaded(monkeypatch, tiny_engine):
    """Lets the command have the shared engine instead of compiling one; holds what it asked for."""
    asked = []

    def load(config, **options):
        asked.append(options)
        return tiny_engine

    monkeypatch.setattr(batch_job, "load", load)
    return asked


@pytest.fixture
def faked(monkeypatch):
    """Lets the command have an engine without a model."""
    engine = FakeEngine()
    monkeypatch.setattr(batch_job, "load", lambda config, **options: engine)
    return engine


@pytest.fixture
def never_loads(monkeypatch):
    def load(*args, **options):
        raise AssertionError("loaded a model")

    monkeypatch.setattr(batch_job, "load", load)


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
    assert [summary[name] for name in ("rows", "answered", "failed", "tokens")] == [4, 4, 0, 5 * 6]
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])
    assert summary["config"].endswith("tiny.toml")
    assert summary["command"].startswith("jaxspec batch ")
    assert summary["versions"]["jax"] == jax.__version__
    assert "CPU" in summary["device"]
    recorded = json.loads((tmp_path / "out.jsonl.run.json").read_text("utf-8"))
    assert recorded["settings"]["max_new_tokens"] == 6
    assert recorded["settings"]["drafter.num_speculative_tokens"] == 2
    assert recorded["settings"]["seed"] == summary["seed"]
    assert {name: recorded[name] for name in ("command", "versions", "config")} == {
        name: summary[name] for name in ("command", "versions", "config")
    }
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


def test_rows_that_may_sample_get_an_engine_that_can(run, loaded, tmp_path):
    """Though the run is greedy; of a pipe it is not known before."""
    row = '{"prompt": "w6 w7", "temperature": 1, "max_new_tokens": 3, "top_p": 0.9, "seed": 1}'
    assert run("--ignore-eos", lines=[row, '{"prompt": "w6"}']) == 0
    assert {row["id"]: len(row["token_ids"]) for row in output(tmp_path)}[0] == 3
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write('{"prompt": "w6"}')
    (tmp_path / "out.jsonl").unlink()
    assert run("--input", f"/dev/fd/{reading}", "--max-new-tokens", "1", "--top-p", "0.5") == 0
    os.close(reading)
    assert [asked["sampling_modes"] for asked in loaded] == [("greedy", "sampled")] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--output", "out.parquet"],
            "--output out.parquet: needs Parquet as input, whose columns it has",
        ),
        (["--input", "in.CSV"], "--input in.CSV: rows are JSON lines"),
        (["--top-p", "0.9"], "--top-p has no effect without --temperature: at 0, decoding is greedy"),
        (["--top-k", "5"], "--top-k has no effect without --temperature"),
        (["--min-p", "0.1"], "--min-p has no effect without --temperature"),
    ],
)
def test_what_would_have_no_effect_is_one_line(
    run, never_loads, tmp_path, capsys, monkeypatch, options, problem
):
    monkeypatch.chdir(tmp_path)
    assert run(*options, lines=LINES) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


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


def test_a_malformed_row_is_reported_and_the_rest_done(run, faked, tmp_path, capsys):
    lines = ['{"prompt": "w6"}', "{", '{"prompt": "long"}', '{"prompt": "fail"}', '{"id": 0, "prompt": "w8"}']
    summary = tmp_path / "summary.json"
    assert run("--max-new-tokens", "2", "--summary", str(summary), lines=[*lines, '{"prompt": "w7"}']) == 1
    assert {row["id"] for row in output(tmp_path)} == {0, 5}
    printed = capsys.readouterr()
    errors = [line for line in printed.err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert sorted(re.search(r"in.jsonl line \d: \w+", error)[0] for error in errors) == [
        "in.jsonl line 2: not",
        "in.jsonl line 3: prompt",
        "in.jsonl line 4: failed",
        "in.jsonl line 5: id",
    ]
    assert "6: 2 answered, 4 failed, 0 answered before" in printed.out
    values = json.loads(summary.read_text("utf-8"))
    assert [values[name] for name in ("rows", "answered", "failed", "skipped")] == [6, 2, 4, 0]
    assert [f"error: {failure}" for failure in values["failures"]] == errors
    assert "6/6" in printed.err


def test_progress_counts_failed_rows_that_the_summary_does_not_list(run, faked, capsys):
    assert run(lines=["{"] * (MAX_FAILURES + 20) + LINES) == 1
    total = MAX_FAILURES + 20 + len(LINES)
    assert f"{total}/{total}" in capsys.readouterr().err


def test_a_row_that_is_lost_on_the_way_is_a_failure(run, faked, monkeypatch, capsys):
    """Whatever may lose it: the count is of answers."""
    monkeypatch.setattr(batch_job.BatchRun, "__iter__", lambda self: (x for x in ()))
    assert run(lines=LINES) == 1
    assert "4: 0 answered, 4 failed, 0 answered before" in capsys.readouterr().out


def test_a_pipe_is_answered(run, faked, tmp_path, capsys):
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write("\n".join(LINES))
    assert run("--input", f"/dev/fd/{reading}") == 0
    os.close(reading)
    assert {row["id"] for row in output(tmp_path)} == {0, "chat", "turns", "ids"}
    assert "4: 4 answered, 0 failed, 0 answered before" in capsys.readouterr().out


def test_a_pipe_is_answered_while_it_is_written(run, faked, tmp_path):
    """The second row is written when the first has its answer."""
    path = tmp_path / "out.jsonl"
    reading, writing = os.pipe()

    def feed():
        with open(writing, "w") as pipe:
            for count in range(3):
                while not path.exists() or path.read_bytes().count(b"\n") < count:
                    threading.Event().wait(0.01)
                pipe.write(f'{{"prompt": "w{count}"}}\n')
                pipe.flush()

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert run("--input", f"/dev/fd/{reading}") == 0
    feeder.join()
    os.close(reading)
    assert [row["id"] for row in output(tmp_path)] == [0, 1, 2]


def test_several_inputs_are_one(run, faked, tmp_path, capsys):
    for name, lines in [("a", LINES[:2]), ("b", LINES[2:]), ("c", ['{"id": "chat", "prompt": "w6"}'])]:
        (tmp_path / name).write_text("\n".join(lines), "utf-8")
    assert run("--input", *(str(tmp_path / name) for name in "abc"), "--keep-order") == 1
    assert [row["id"] for row in output(tmp_path)] == [0, "chat", "turns", "ids"]
    assert (
        f"{tmp_path / 'c'} line 1: id 'chat' is taken by {tmp_path / 'a'} line 2" in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--keep-order", "--seed=1"])
def test_the_order_of_the_answers(run, faked, tmp_path, option):
    assert run(option, lines=[f'{{"prompt": "w{i}"}}' for i in range(30)]) == 0
    ids = [row["id"] for row in output(tmp_path)]
    assert sorted(ids) == list(range(30))
    assert (ids == sorted(ids)) == (option == "--keep-order")


def test_neighbouring_seeds_share_no_answer(run, loaded, tmp_path):
    """At row i the seed was once that of the run plus i."""
    found = []
    for seed in "0", "1":
        options = ["--max-new-tokens", "8", "--ignore-eos", "--temperature", "1", "--seed", seed]
        assert run(*options, lines=['{"prompt": "w6"}'] * 4) == 0
        found += [tuple(row["token_ids"]) for row in output(tmp_path)]
        (tmp_path / "out.jsonl").unlink()
    assert len(set(found)) == 8


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_answers(run, loaded, tmp_path, capsys):
    summary = tmp_path / "summary.json"
    options = ["--max-new-tokens", "8", "--temperature", "1", "--summary", str(summary)]
    answers, seeds = [], []
    for number in range(3):
        again = ["--seed", str(seeds[1])] if number == 2 else []
        assert run(*options, *again, lines=LINES) == 0
        answers.append({row["id"]: (row["token_ids"], row["seed"]) for row in output(tmp_path)})
        seeds.append(json.loads(summary.read_text("utf-8"))["seed"])
        assert f"seed                    {seeds[-1]}\n" in capsys.readouterr().out
        (tmp_path / "out.jsonl").unlink()
    assert seeds[0] != seeds[1] == seeds[2]
    assert answers[0] != answers[1] == answers[2]
    assert answers[2]["ids"][1] == row_seed(seeds[2], "ids", 0)


def interrupted_after(count, tmp_path):
    """`OutputFile.append`, interrupted after so many rows."""
    append = OutputFile.append

    def interrupted(self, record):
        append(self, record)
        if len(output(tmp_path)) == count:
            raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("seed", [["--seed", "3"], []])
def test_resuming_gives_what_an_uninterrupted_run_gives(run, loaded, tmp_path, monkeypatch, capsys, seed):
    lines = [f'{{"prompt": "w{i} w7"}}' for i in range(10, 22)]
    options = ["--max-new-tokens", "6", "--temperature", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "append", interrupted_after(5, tmp_path))
        assert run(*options, *seed, lines=lines) == 130
    assert "--resume" in capsys.readouterr().err
    finished = output(tmp_path)
    assert len(finished) == 5
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"id": 11, "text": "torn')

    assert run(*options, "--resume") == 0
    rows = output(tmp_path)
    assert rows[:5] == finished
    assert len(rows) == 12
    assert "12: 7 answered, 0 failed, 5 answered before" in capsys.readouterr().out

    summary = tmp_path / "summary.json"
    assert run(*options, "--resume", "--summary", str(summary)) == 0
    assert output(tmp_path) == rows
    assert "nothing to do" in capsys.readouterr().err
    assert len(loaded) == 2
    values = json.loads(summary.read_text("utf-8"))
    assert [values[name] for name in ("rows", "answered", "failed", "skipped")] == [12, 0, 0, 12]

    (tmp_path / "out.jsonl").unlink()
    assert run(*options, "--seed", str(values["seed"]), lines=lines) == 0
    assert {row["id"]: row for row in output(tmp_path)} == {row["id"]: row for row in rows}


def test_resuming_in_order_keeps_the_order(run, faked, tmp_path, monkeypatch):
    lines = [f'{{"prompt": "w{i}"}}' for i in range(30)]
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "append", interrupted_after(7, tmp_path))
        assert run("--keep-order", lines=lines) == 130
    assert run("--keep-order", "--resume") == 0
    assert [row["id"] for row in output(tmp_path)] == list(range(30))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--temperature", "1"], "temperature 0.0 and not 1.0"),
        (["--max-new-tokens", "7"], "max_new_tokens none and not 7"),
        (["--seed", "4"], "seed 3 and not 4"),
        (["--raw", "--stop", "w9"], 'stop [] and not ["w9"], raw false and not true'),
        (["--num-speculative-tokens", "2"], "drafter.num_speculative_tokens 3 and not 2"),
        (["--no-speculation"], 'drafter.kind "ngram" and not "none"'),
        (["--keep-order"], "keep_order false and not true"),
    ],
)
def test_other_settings_are_not_mixed_into_an_output(run, faked, tmp_path, capsys, options, problem):
    assert run("--limit", "2", "--seed", "3", lines=LINES) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert run("--resume", *options) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: cannot resume {tmp_path / 'out.jsonl'}: it was begun with {problem}; "
        "--resume=force continues anyway\n"
    )
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run("--resume=force", *options) == 0
    assert len(output(tmp_path)) == 4


def test_another_model_is_not_mixed_into_an_output(run, faked, tiny_config, tmp_path, capsys):
    assert run("--limit", "2", "--no-speculation", lines=LINES) == 0
    capsys.readouterr()
    shutil.copytree(tiny_config.parent / "model", tmp_path / "model")
    other = tmp_path / "other.toml"
    other.write_text('[target]\nsource = "model"\n')
    assert run("--resume", "--no-speculation", "--limit", "3", config=other) == 0
    (tmp_path / "model" / "config.json").write_text("{}")
    assert run("--resume", "--no-speculation", config=other) == 2
    assert "it was begun with another model; --resume=force" in capsys.readouterr().err


def test_another_input_is_not_mixed_into_an_output(run, faked, tmp_path, capsys):
    assert run("--limit", "2", lines=LINES) == 0
    capsys.readouterr()
    assert run("--resume", lines=[LINES[0], LINES[1].replace("w9", "w8")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "in.jsonl line 2 is not what was answered as 'chat'; --resume=force keeps that answer" in error
    grown = [LINES[0] + " ", LINES[1], *LINES[2:], '{"prompt": "w7"}']
    assert run("--resume", lines=grown) == 0
    assert {row["id"] for row in output(tmp_path)} == {0, "chat", "turns", "ids", 4}


def test_two_runs_never_write_one_output(run, faked, tmp_path, capsys):
    with closing(OutputFile(tmp_path / "out.jsonl", resume=False)):
        for options in ([], ["--resume"], ["--resume=force"]):
            assert run(*options, lines=LINES) == 2
            error = f"error: {tmp_path / 'out.jsonl'}: another run is writing it\n"
            assert capsys.readouterr().err == error
    assert run(lines=LINES) == 0
    assert len(output(tmp_path)) == 4


@pytest.mark.parametrize("device", ["summary", "stdout", "output"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_full_device_is_one_line(run, faked, tmp_path, monkeypatch, capsys, device):
    options = [] if device == "stdout" else [f"--{device}", "/dev/full"]
    with open("/dev/full", "w") as full:
        if device == "stdout":
            monkeypatch.setattr(sys, "stdout", full)
        assert run(*options, lines=LINES) == 2
    *_, last = capsys.readouterr().err.replace("\r", "\n").splitlines()
    name = "to stdout" if device == "stdout" else "/dev/full"
    assert last == f"error: cannot write {name}: No space left on device"
    assert device == "output" or len(output(tmp_path)) == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
@pytest.mark.parametrize("lines", [LINES, ["{", *LINES]], ids=["progress", "an error"])
def test_a_stderr_that_cannot_be_written_is_not_taken_for_rows_that_failed(
    run, faked, monkeypatch, capsys, lines
):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run(lines=lines) == 2
        full.flush()  # as Python does at exit
    assert capsys.readouterr().out == ""


def test_without_stderr_all_rows_are_answered_and_stdout_is_left_alone(
    run, faked, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stderr", None)
    with closing(io.StringIO()) as table:
        monkeypatch.setattr(sys, "stdout", table)
        assert run(lines=["{", *LINES]) == 1
        assert table.getvalue().startswith("rows                    5: 4 answered, 1 failed")
    sys.stderr.close()
    assert len(output(tmp_path)) == 4


def test_a_terminal_is_input_and_output(run, faked):
    ours, theirs = os.openpty()
    quiet = termios.tcgetattr(theirs)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, quiet)
    os.write(ours, b'{"prompt": "w6"}\n\x04')
    terminal = os.ttyname(theirs)
    with open(ours, "rb") as shown:
        assert run("--input", terminal, "--output", terminal, "--max-new-tokens", "2") == 0
        assert json.loads(shown.readline())["id"] == 0
    os.close(theirs)


def test_answers_to_stdout_are_all_that_is_there(run, faked, tmp_path, monkeypatch, capsys):
    with (tmp_path / "out.jsonl").open("a") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert run(lines=LINES) == 0
    assert len(output(tmp_path)) == 4
    assert "4: 4 answered" in capsys.readouterr().err


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
            "full.jsonl exists: give --resume to continue it, or another --output",
        ),
        (["--output", "full.jsonl", "--resume"], "full.jsonl line 1 is no output row"),
        (["--summary", "full.jsonl", "--output", "full.jsonl"], "must be different files"),
        (["--input", "empty.jsonl"], "empty.jsonl: no rows"),
        (["--input", "in.jsonl", "missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["--input", "in.jsonl", "in.jsonl"], "must be different files"),
        (["--input", "full.jsonl", "--output", "full.jsonl"], "must be different files"),
        (["--summary", "out.jsonl.run.json", "--output", "out.jsonl"], "must be different files"),
        (["--output", "/dev/null", "--resume"], "/dev/null is not a regular file: there is nothing"),
        (["--resume=yes"], "argument --resume: invalid choice: 'yes' (choose from"),
        (["--replicas", "0"], "--replicas must be at least 1, got 0"),
        (["--replicas", "-2"], "--replicas must be at least 1, got -2"),
        (["--replicas", "1000"], "1000 replicas need a CPU core each, and there are "),
        (["--replicas", "2", "--tensor-parallel", "3"], "engine.tensor_parallel is 3: JAX sees 1 x CPU"),
        (["--tensor-parallel", "0"], "engine.tensor_parallel must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(
    run, tmp_path, monkeypatch, capsys, options, problem
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HostDevices, "find", lambda: HostDevices("cpu", 1, "1 x CPU"))
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
        ("nothing", [], "'nothing' is not a configuration"),
        ("missing.toml", [], "missing.toml: no such file or folder"),
        (None, ["--batch-size", "0"], "engine.batch_size must be a whole number of at least 1, got 0"),
        (None, ["--num-speculative-tokens", "0"], "drafter.num_speculative_tokens must be a whole number"),
        ("plain.toml", ["--num-speculative-tokens", "2"], "--num-speculative-tokens: plain has no drafter"),
    ],
)
def test_a_bad_configuration_is_one_line(run, tiny_config, tmp_path, capsys, config, options, problem):
    if config == "plain.toml":
        config = tmp_path / config
        config.write_text(f'[target]\nsource = "{tiny_config.parent / "model"}"\n', "utf-8")
    assert run(*options, lines=LINES, config=config or tiny_config) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1


def test_all_rows_malformed(run, never_loads, capsys):
    assert run(lines=["{", "]"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("error: ") == 2
    assert "2: 0 answered, 2 failed, 0 answered before" in printed.out
