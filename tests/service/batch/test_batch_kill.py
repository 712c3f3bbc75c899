"""SIGKILL at random moments of a run, and `--resume`: every id once, each answer as in an undisturbed run.

The long form, 50 kills of runs with a model, is marked slow:

    python -m pytest -n0 tests/service/batch/test_batch_kill.py -m slow
"""

import json
import os
import random
import time
from pathlib import Path

import pytest
from child_process import python

KILLED = -9
OPTIONS = ["--temperature", "1", "--seed", "7", "--max-new-tokens", "40", "--ignore-eos"]


@pytest.fixture(scope="module")
def process(request, tmp_path_factory):
    """A process that runs the batch script, over an engine of the kind that the test's parameter says."""
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(tests), "PYTHONWARNINGS": "ignore"}
    script, stderr = (
        Path(__file__).with_name("killable_runs.py"),
        tmp_path_factory.mktemp("killed") / "stderr",
    )
    with python(script, request.param, stderr=stderr, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def lines(count):
    """Rows of all kinds, a malformed one among them."""
    for i in range(count):
        text = f"w{6 + i % 100} w{10 + i % 7}"
        forms = [{"prompt": text}, {"turns": [text, "w9", "w8"]}, {"prompt": text, "id": f"row {i}"}]
        yield json.dumps(forms[i % 3]) + "\n"
    yield "{\n"


def kill_and_resume(process, config, folder, *, rows, kills, options):
    """Runs undisturbed, then kills at so many moments, resuming until all is done, again and again.

    Returns:
      How many rows each killed run left behind.
    """
    (folder / "in.jsonl").write_text("".join(lines(rows)), "utf-8")

    def run(output, *more, seconds=None):
        files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / output)]
        arguments = [str(config), *files, *OPTIONS, *options, *more]
        process.stdin.write(json.dumps({"arguments": arguments, "seconds": seconds}) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def records(output):
        return [json.loads(line) for line in (folder / output).read_text("utf-8").splitlines()]

    start = time.monotonic()
    assert run("whole.jsonl") == 1
    whole_seconds = time.monotonic() - start
    whole = records("whole.jsonl")
    assert len(whole) == rows

    rng, left = random.Random(0), []
    while len(left) < kills:
        (folder / "out.jsonl").unlink(missing_ok=True)
        status = KILLED
        while status == KILLED:
            seconds = rng.uniform(0, whole_seconds) if len(left) < kills else None
            status = run("out.jsonl", "--resume", seconds=seconds)
            if status == KILLED:
                path = folder / "out.jsonl"
                left.append(path.read_bytes().count(b"\n") if path.exists() else 0)
        assert status == 1
        found = records("out.jsonl")
        assert len(found) == rows
        if "--keep-order" in options:
            assert found == whole
        else:
            assert {row["id"]: row for row in found} == {row["id"]: row for row in whole}
    return left


@pytest.mark.parametrize("process", ["fake"], indirect=True)
@pytest.mark.parametrize("options", [[], ["--keep-order"]], ids=["as they end", "in order"])
def test_killed_runs_are_resumed_to_the_same_answers(process, tiny_config, tmp_path, options):
    left = kill_and_resume(process, tiny_config, tmp_path, rows=60, kills=6, options=options)
    assert any(0 < count < 60 for count in left)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("process", ["model"], indirect=True)
def test_killed_runs_of_a_model_are_resumed_to_the_same_answers(process, tiny_config, tmp_path):
    left = kill_and_resume(process, tiny_config, tmp_path, rows=600, kills=50, options=[])
    print(f"rows left behind by {len(left)} kills: {left}")
    assert len({count for count in left if 0 < count < 600}) > 10
