"""`python -m jaxspec` on the tiny model."""

import io
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from golden_files import golden_folder
from tiny_engines import assert_idle
from tiny_gguf import gguf_tensors, hf_weights, metadata, write_gguf
from tiny_tokenizers import byte_level

import jaxspec
from jaxspec import __main__ as command
from jaxspec.commands import COMMANDS, answering
from jaxspec.commands import chat as chat_command
from jaxspec.commands.command_line import Parser, write


@pytest.fixture
def run(monkeypatch, tiny_config, tiny_engine):
    """Runs the command over the shared engine; returns its exit status."""
    monkeypatch.setattr(jaxspec, "load", lambda model, **options: tiny_engine)
    return lambda *arguments: command.main([*arguments, "--model", str(tiny_config)])


def test_the_answer_goes_to_stdout_and_the_statistics_to_stderr(run, tiny_engine, capsys):
    assert run("w6 w7", "--max-new-tokens", "9", "--ignore-eos") == 0
    printed = capsys.readouterr()
    expected = tiny_engine.generate("w6 w7", max_new_tokens=9, ignore_eos=True)
    assert printed.out == expected.text + "\n"
    assert re.fullmatch(
        r"\[9 tokens: the first after \d+\.\d\d s(, then \d+\.\d tokens/s)?; "
        rf"{expected.stats.steps} target passes, "
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


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_answer(run, capsys):
    sampled = ["w6 w7", "--max-new-tokens", "9", "--temperature", "1"]
    printed = []
    for _ in range(2):
        assert run(*sampled) == 0
        printed.append(capsys.readouterr())
    first, second = (re.search(r"; seed (\d+)\]\n$", out.err)[1] for out in printed)
    assert first != second
    assert run(*sampled, "--seed", second) == 0
    assert capsys.readouterr().out == printed[1].out


def test_an_answer_that_failed_is_no_success(run, tiny_engine, monkeypatch, capsys):
    def stream(*arguments, **options):
        for delta in whole(*arguments, **options):
            if delta.generation is not None:
                failed = replace(delta.generation, finish_reason="failed", error="its logits are NaN")
                delta = replace(delta, generation=failed)
            yield delta

    whole = tiny_engine.stream
    monkeypatch.setattr(tiny_engine, "stream", stream)
    assert run("w6") == 1
    assert capsys.readouterr().err.endswith("error: failed: its logits are NaN\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([""], "the prompt is empty"),
        (["w6", "--temperature", "-1"], "temperature must be a number, 0 or more, got -1.0"),
        (["w6", "--top-k", "many"], "argument --top-k: invalid int value: 'many' (see --help)"),
        (["w6", "--num-speculative-tokens", "2", "--no-speculation"], "not allowed with argument"),
        (
            ["w6 " * 200],
            "tokens leaves no room to answer: max_model_len is 128; load with a larger one (--max-m",
        ),
        (
            ["w6 " * 90_000],
            "characters makes more than 128 tokens, the max_model_len; load with a larger one (--max",
        ),
        (["w6 \udcff"], "the prompt is not valid Unicode"),
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


@pytest.mark.parametrize(
    ("end", "rate"), [(11.5, ", then 4.0 tokens/s"), (10.5001, "")], ids=["later", "with the first"]
)
def test_the_first_token_and_the_rate_after_it_are_apart(run, tiny_engine, monkeypatch, capsys, end, rate):
    """The clock is read at the start, at the first piece and at the end."""
    times = iter([10.0, 10.5, end])
    monkeypatch.setattr(answering, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    deltas = [jaxspec.Delta("a", [1]), jaxspec.Delta("b", [2, 3])]
    generation = tiny_engine.generate("w6", max_new_tokens=5, ignore_eos=True)
    deltas.append(jaxspec.Delta("", [4, 5], generation))
    monkeypatch.setattr(tiny_engine, "stream", lambda *arguments, **options: iter(deltas))
    assert run("w6") == 0
    assert f"[5 tokens: the first after 0.50 s{rate}; " in capsys.readouterr().err


@pytest.fixture
def stdin(monkeypatch):
    """Replaces stdin by bytes."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))


def test_a_dash_reads_the_prompt_from_stdin(run, tiny_engine, stdin, capsys):
    expected = tiny_engine.generate("w6 w7\nw8", max_new_tokens=9, ignore_eos=True).text
    stdin(b"w6 w7\nw8\n")
    assert run("-", "--max-new-tokens", "9", "--ignore-eos") == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("text", "problem"), [(b"", "the prompt is empty"), (b"w6 \xff", "cannot read the prompt from stdin: ")]
)
def test_a_bad_prompt_on_stdin_is_one_line(run, stdin, capsys, text, problem):
    stdin(text)
    assert run("-") == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxspec {jaxspec.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        *(([command, "--help"], 0) for command in COMMANDS),
        (["w6", "--wrong"], 2),
        (["generate", "w6", "--wrong"], 2),
        (["batch", "nothing", "--input", "in", "--output", "out"], 2),
        (["batch", "smollm2-135m", "--input", "in", "--output", "out", "--limit", "0"], 2),
        (["train", "--output", "out"], 2),
        (["inspect", "no.toml"], 2),
        (["convert", "a"], 2),
        (["bench", "--limit", "0"], 2),
        (["w6", "--temperature", "-1"], 2),
        (["w6", "--model", "nothing"], 2),
    ],
)
def test_a_command_line_that_answers_nothing_imports_no_jax(arguments, status):
    program = "import sys\nfrom jaxspec.__main__ import main\ntry: status = main(sys.argv[1:])\n"
    program += "except SystemExit as left: status = left.code\nprint(status, *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    exit_status, *modules = done.stderr.splitlines()[-1].split()
    assert int(exit_status) == status
    assert not {"jax", "numpy", "tokenizers"} & set(modules)


def test_the_command_is_generate_where_none_is_named(run, tiny_engine, capsys):
    """So a prompt that is a command's name is asked by `generate`."""
    options = ["--max-new-tokens", "5", "--ignore-eos"]
    for prompt in ("w6 w7", "batch"):
        expected = tiny_engine.generate(prompt, max_new_tokens=5, ignore_eos=True).text
        assert run("generate", prompt, *options) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_the_help_of_jaxspec_names_every_command(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    for name, about in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", said, re.MULTILINE)


def chat(*turns, options=()):
    """Runs a chat over stdin; returns its exit status."""
    sys.stdin = io.StringIO("".join(f"{turn}\n" for turn in turns))
    return chat_command.main(["--max-new-tokens", "9", "--ignore-eos", *options])


@pytest.fixture
def chatting(monkeypatch, tiny_config, tiny_engine):
    """Runs chats over the shared engine; returns the conversations that it was asked."""
    asked = []
    stream = tiny_engine.stream

    def record(messages, *arguments, **options):
        asked.append([(message["role"], message["content"]) for message in messages])
        return stream(messages, *arguments, **options)

    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(jaxspec, "load", lambda model, **options: tiny_engine)
    monkeypatch.setattr(tiny_engine, "stream", record)
    return asked


def test_a_chat_answers_every_turn_with_those_before_it_in_view(chatting, capsys):
    assert chat("w6", "", "w7", options=["--system", "w8"]) == 0
    printed = capsys.readouterr()
    first, _ = printed.out.splitlines()
    system = ("system", "w8")
    assert chatting == [
        [system, ("user", "w6")],
        [system, ("user", "w6"), ("assistant", first), ("user", "w7")],
    ]
    assert printed.err.count("[9 tokens: ") == 2


def test_clear_begins_a_new_conversation(chatting):
    assert chat("w6", "/clear", "w7", options=["--system", "w8"]) == 0
    assert chatting[-1] == [("system", "w8"), ("user", "w7")]


def test_interrupting_an_answer_of_a_chat_keeps_what_was_said(chatting, monkeypatch, tiny_engine, capsys):
    written = []

    def interrupted(text):
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(answering, "write", interrupted)
    assert chat("w6", "w7", options=["--max-new-tokens", "40"]) == 0
    assert chatting[1][1] == ("assistant", "".join(written[:2]))
    assert "[stopped]" in capsys.readouterr().err
    assert_idle(tiny_engine)


def test_an_answer_without_text_is_one_and_the_chat_goes_on(chatting, monkeypatch, tiny_engine):
    asked = [{"role": "user", "content": "w6"}]
    first = tiny_engine.generate(asked, max_new_tokens=9, ignore_eos=True).text.split()[0]
    assert chat("w6", "w7", options=["--stop", first]) == 0
    assert chatting[-1] == [("user", "w6"), ("assistant", ""), ("user", "w7")]

    written = []

    def interrupted(text):
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(answering, "write", interrupted)
    chatting.clear()
    assert chat("w6", "w7") == 0
    assert chatting[1][1] == ("assistant", "")


def test_a_turn_that_is_no_text_is_refused_and_the_chat_goes_on(chatting, capsys):
    assert chat("\ud800", "w7") == 0
    assert "error: the prompt is not valid Unicode" in capsys.readouterr().err
    assert chatting == [[("user", "w7")]]


def test_interrupting_a_chat_at_its_prompt_ends_it(chatting, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(KeyboardInterrupt))
    assert chat() == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_turn_that_is_too_long_is_refused_and_the_chat_goes_on(chatting, capsys):
    assert chat("w6 " * 200, "w7") == 0
    printed = capsys.readouterr()
    assert "error: prompt of " in printed.err
    assert chatting[-1] == [("user", "w7")]
    assert len(printed.out.splitlines()) == 1


def test_an_unknown_model_is_one_line(capsys):
    assert command.main(["hello", "--model", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: 'nothing' is not a configuration")


def test_interrupting_while_it_loads_is_no_traceback(run, monkeypatch, capsys):
    def interrupted(model, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxspec, "load", interrupted)
    assert run("w6") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_interrupting_an_answer_is_no_traceback_and_frees_its_slot(run, tiny_engine, monkeypatch, capsys):
    written = []

    def interrupted(text):
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(answering, "write", interrupted)
    assert run("w6 w7", "--max-new-tokens", "60", "--ignore-eos") == 130
    assert len(written) == 3
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert_idle(tiny_engine)


@pytest.fixture
def stdout_to(monkeypatch):
    """Replaces stdout by a file, given by path or descriptor."""
    with ExitStack() as files:
        yield lambda path: monkeypatch.setattr(sys, "stdout", files.enter_context(open(path, "w")))
        monkeypatch.undo()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_full_stdout_is_one_line(run, tiny_engine, stdout_to, capsys):
    stdout_to("/dev/full")
    assert run("w6 w7", "--max-new-tokens", "60", "--ignore-eos") == 2
    assert capsys.readouterr().err == "error: cannot write to stdout: No space left on device\n"
    assert_idle(tiny_engine)


def test_a_pipe_without_a_reader_is_one_line(run, stdout_to, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    stdout_to(writing)
    assert run("w6 w7") == 2
    assert capsys.readouterr().err == "error: cannot write to stdout: Broken pipe\n"


def test_a_closed_stdout_is_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert run("w6 w7") == 2
    assert capsys.readouterr().err == "error: cannot write to stdout: it is closed\n"


def test_a_closed_stderr_takes_nothing_and_gives_nothing_to_stdout(run, tiny_engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    tiny_engine.programs.compile([], progress=True)
    assert run("w6 w7", "--max-new-tokens", "9", "--ignore-eos") == 0
    assert run("") == 2
    sys.stderr.close()
    expected = tiny_engine.generate("w6 w7", max_new_tokens=9, ignore_eos=True)
    assert capsys.readouterr().out == expected.text + "\n"


def test_what_the_encoding_of_stdout_lacks_is_escaped_and_said_once(monkeypatch, capsys):
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_file)
    for text in ("caf", "é ", "→", "\n"):
        write(text)
    assert ascii_file.buffer.getvalue() == b"caf\\xe9 \\u2192\n"
    error = capsys.readouterr().err
    assert error == "note: characters not in stdout's ascii are escaped; set PYTHONIOENCODING=utf-8\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_help_to_a_full_stdout_is_one_line(stdout_to, capsys):
    stdout_to("/dev/full")
    with pytest.raises(SystemExit) as exit_:
        Parser().parse_args(["--help"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: cannot write to stdout: No space left on device\n"


def test_a_reader_that_goes_away_is_one_line_of_the_process(tiny_config):
    """Python prints no further error when it flushes at exit, and the text read is the model's."""
    options = ["--model", str(tiny_config), "--max-new-tokens", "120", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec", "w6 w7", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    with process:
        assert process.stdout.read(2)
        process.stdout.close()
        *_, last = process.stderr.read().replace("\r", "\n").splitlines()
    assert last == "error: cannot write to stdout: Broken pipe"
    assert process.returncode == 2


@pytest.fixture
def loaded(monkeypatch, tiny_engine):
    """Records the arguments of `load`."""
    calls = []

    def load(model, **options):
        calls.append((model, options["drafter"]))
        return tiny_engine

    monkeypatch.setattr(jaxspec, "load", load)
    return calls


def test_a_checkpoint_alone_is_left_to_load_unless_an_option_says_how_to_draft(loaded, tmp_path):
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    assert command.main(["w6", "--model", path]) == 0
    assert command.main(["w6", "--model", path, "--num-speculative-tokens", "7"]) == 0
    assert command.main(["w6", "--model", path, "--no-speculation"]) == 0
    assert command.main(["w6", "--model", path, "--drafter", "ngram"]) == 0
    assert loaded == [
        (path, {}),
        (path, {"num_speculative_tokens": 7}),
        (path, {"kind": "none"}),
        (path, {"kind": "ngram"}),
    ]


def test_a_head_is_told_by_its_checkpoint(loaded, tiny_config):
    head = str(golden_folder("eagle3-residual-normed"))
    assert command.main(["w6", "--model", str(tiny_config), "--drafter", head]) == 0
    assert loaded == [
        (str(tiny_config), {"kind": "eagle3", "source": head, "file": None, "sha256": None}),
    ]


def test_a_gguf_answers_a_chat(tmp_path, capsys):
    weights = {name: weight for name, weight in hf_weights().items() if not name.endswith(".bias")}
    path = write_gguf(tmp_path / "tiny.gguf", {**metadata(), **byte_level()}, gguf_tensors(weights))
    assert command.main(["hello w", "--model", str(path), "--max-new-tokens", "5", "--ignore-eos"]) == 0
    printed = capsys.readouterr()
    assert "[5 tokens: " in printed.err


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: write_gguf(path, architecture="bloom"), "architecture 'bloom' is not supported"),
        (
            lambda path: write_gguf(path, tensors={"token_embd.weight": (np.zeros((9, 8), np.uint8), "I8")}),
            "tensor 'token_embd.weight' is I8, which is not supported",
        ),
    ],
)
def test_a_gguf_that_is_not_supported_is_one_line(tmp_path, capsys, write, message):
    assert command.main(["hello", "--model", str(write(tmp_path / "bad.gguf"))]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
