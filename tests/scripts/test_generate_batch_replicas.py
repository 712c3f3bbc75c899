"""`jaxspec batch` with two engines of the tiny model, as a user runs it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from child_process import python

from jaxspec.commands import batch, batch_job

OPTIONS = ["--max-new-tokens", "8", "--ignore-eos", "--temperature", "1", "--seed", "3", "--keep-order"]


@pytest.fixture
def run_alone(monkeypatch, tiny_engine):
    """Runs the command with one engine, in this process."""
    monkeypatch.setattr(batch_job, "load", lambda config, **options: tiny_engine)
    return batch.main


def lines(count):
    for i in range(count):
        text = f"w{6 + i} w{10 + i % 7}"
        forms = [{"prompt": text}, {"turns": [text, "w9"]}, {"prompt": text, "id": f"row {i}"}]
        yield json.dumps(forms[i % 3]) + "\n"


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in Linux's /proc")
def test_interrupted_with_two_engines_and_resumed_with_one(run_alone, tiny_config, tmp_path):
    """Its input is a pipe, which still holds rows when Ctrl-C comes."""
    source, whole, output = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    source.write_text("".join(lines(30)), "utf-8")
    assert run_alone([str(tiny_config), "--input", str(source), "--output", str(whole), *OPTIONS]) == 0

    files = ["--input", "-", "--output", output]
    command = ["-m", "jaxspec", "batch", tiny_config, *files, *OPTIONS, "--replicas", "2"]
    with python(*command, stderr=tmp_path / "stderr", start_new_session=True) as process:
        process.stdin.writelines(lines(20))
        process.stdin.flush()
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 20):
            time.sleep(0.02)
        replicas = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.wait()  # while its input is open
    said = re.split("[\r\n]+", (tmp_path / "stderr").read_text())
    assert process.returncode == 130, said
    held = "what was finished, up to the first row that was not"
    assert said[-2:] == [f"interrupted: {output} holds {held}; --resume continues", ""]
    assert len(replicas) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in replicas)
    assert not [line for line in said if "Traceback" in line]
    assert output.read_text("utf-8") == "".join(whole.read_text("utf-8").splitlines(keepends=True)[:20])

    resumed = ["--input", str(source), "--output", str(output), *OPTIONS, "--resume"]
    assert run_alone([str(tiny_config), *resumed]) == 0
    assert output.read_text("utf-8") == whole.read_text("utf-8")
