"""`jaxspec serve` as a process: it starts, serves, and ends as signals tell it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from child_process import python

from jaxspec.commands import serve
from jaxspec.installation import install_command

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w6 w7"}], "temperature": 0}
LONG = {**CHAT, "stream": True, "max_tokens": 100, "ignore_eos": True}
SLOW = """
import time
from jaxspec.engine.rounds.core import EngineCore
from programs_when_run import compile_only_what_runs
compile_only_what_runs()
step = EngineCore.step
EngineCore.step = lambda core: time.sleep(0.05) or step(core)
"""

COMPILES = """
import time
from jaxspec.engine.rounds.preparation import Preparation
from jaxspec.engine.device.lowering import Lowering
Preparation._prepare = lambda preparation, *wanted: time.sleep(300)
Lowering.compile = lambda *arguments: time.sleep(300)
"""


@contextmanager
def served(tiny_config, tmp_path, *words, code=SLOW, **environment):
    """A process that serves the tiny model, slowly, and a client of it."""
    (tmp_path / "slow.py").write_text(code, "utf-8")
    command = ["-m", "jaxspec", "serve", tiny_config, "--port", "0", "--import", tmp_path / "slow.py", *words]
    stderr = tmp_path / "stderr"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    with python(*command, stderr=stderr, env=environment) as process:
        try:
            while "/v1\n" not in stderr.read_text("utf-8"):
                assert process.poll() is None, stderr.read_text("utf-8")
                time.sleep(0.05)
            line = next(line for line in stderr.read_text("utf-8").splitlines() if "/v1" in line)
            url = line.rpartition(" ")[2].removesuffix("/v1")
            assert line == f"serving tiny at {url}/v1"
            transport = httpx.HTTPTransport(retries=20)  # it listens a moment later
            with httpx.Client(base_url=url, transport=transport, timeout=60) as http:
                yield process, http, stderr
        finally:
            process.kill()


def events_after(process, http, number):
    """The events of an answer, in the midst of which the process gets a signal."""
    with http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(number)
        return [line.removeprefix("data: ") for line in (first, *lines) if line]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_answers_come_to_their_end_before_it_ends(tiny_config, tmp_path, number, status):
    with served(tiny_config, tmp_path) as (process, http, stderr):
        assert http.get("/health").status_code == 200
        *events, done = events_after(process, http, number)
        assert done == "[DONE]"
        assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == status
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{http.base_url}/health", trust_env=False)
        assert "Traceback" not in stderr.read_text("utf-8")


def test_without_time_answers_are_aborted_and_say_so(tiny_config, tmp_path):
    with served(tiny_config, tmp_path, "--grace", "0.2") as (process, http, stderr):
        started = time.monotonic()
        *_, last = events_after(process, http, signal.SIGTERM)
        assert json.loads(last)["error"]["message"] == "the answer was aborted: the engine was closed"
        assert process.wait(60) == 0
        assert time.monotonic() - started < 20  # much less than --grace is by default
        assert "Traceback" not in stderr.read_text("utf-8")


def test_programs_that_are_being_compiled_are_not_waited_for(tiny_config, tmp_path):
    """More requests than there are threads wait for some, and background threads compile others."""
    asking = {**CHAT, "presence_penalty": 0.5}
    with (
        served(tiny_config, tmp_path, "--grace", "1", code=COMPILES) as (process, http, stderr),
        ThreadPoolExecutor(70) as pool,  # more than `_THREADS` of the application
    ):
        assert http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}).status_code == 200
        waiting = [pool.submit(http.post, "/v1/chat/completions", json=asking) for _ in range(70)]
        time.sleep(2)  # until all of them wait
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        for each in waiting:
            assert each.result().status_code == 503
            assert each.result().json()["error"]["message"] == "the engine was closed"
        assert "Traceback" not in stderr.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["--max-queue", "0"], "--max-queue must be at least 1, got 0"),
        (["--max-body", "0"], "--max-body must be at least 1, got 0"),
        (["--max-prompt", "-1"], "--max-prompt must be at least 1, got -1"),
        (["--grace", "nan"], "--grace must be 0 to 86400, got nan"),
        (["--host", "no such host"], "--host no such host: "),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: Cannot assign requested address"),
        (["--api-key-file", "missing"], "--api-key-file missing: No such file or directory"),
        (["--batch-size", "0"], "engine.batch_size must be a whole number of at least 1, got 0"),
        (["--drafter", "nothing"], "--drafter: "),
        (["--no-speculation", "--drafter", "ngram"], "--drafter has no effect with --no-speculation"),
        (["--no-speculation", "--num-speculative-tokens", "2"], "not allowed with argument"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_loaded(
    tiny_config, monkeypatch, tmp_path, capsys, words, problem
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(serve.KEY, raising=False)
    monkeypatch.setattr(serve, "_run", lambda *arguments: pytest.fail("it would load"))
    try:
        status = serve.main([str(tiny_config), *words])
    except SystemExit as exit_:
        status = exit_.code
    told = capsys.readouterr().err
    assert (status, told.count("\n"), told[:7]) == (2, 1, "error: ")
    assert problem in told


@pytest.mark.parametrize("key", ["", "two words", "schlüssel"])
def test_a_key_that_no_header_can_hold(tiny_config, monkeypatch, capsys, key):
    monkeypatch.setenv(serve.KEY, key)
    assert serve.main([str(tiny_config)]) == 2
    assert f"error: {serve.KEY}: a key is printable ASCII" in capsys.readouterr().err


def test_a_port_that_is_taken(tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(serve, "_run", lambda *arguments: pytest.fail("it would load"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert serve.main([str(tiny_config), "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: --host 127.0.0.1 --port {port}: Address already in use\n"


def test_without_the_extra_it_says_what_to_install(tiny_config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve.main([str(tiny_config)]) == 2
    assert capsys.readouterr().err == (
        f"error: this needs uvicorn, which is not installed: {install_command('serve')}\n"
    )


def test_a_usage_error_imports_neither_jax_nor_fastapi():
    program = (
        "import sys\nfrom jaxspec.__main__ import main\n"
        "status = main(['serve', 'smollm2-135m', '--max-queue', '0'])\n"
        "print(status, *{'jax', 'fastapi', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
