import hashlib
import json
from itertools import pairwise
from types import SimpleNamespace

import bench.load
import bench_load
import numpy as np
import pytest
from bench.load import Answered, Run, summary
from bench.workloads import Asked, poisson, workloads

from jaxspec import AcceptanceStats, SamplingParams
from jaxspec.engine.host.counters import Counters

SIZES = "--batch-size 2 --max-model-len 1024 --copy-bytes 4096 --repeats 1"
MODEL = "--shape tiny --k 1 --acceptance 1.5 --engine dtype=float32 --engine prefill_chunk=64"
SHAPE = [*MODEL.split(), *SIZES.split()]


def test_the_requests_are_those_that_other_engines_were_timed_on():
    requests = workloads(vocab_size=1 << 20)
    mixed = requests["mixed 256"]
    assert sum(len(asked.prompt) for asked in mixed) == 62366
    assert sum(asked.new_tokens for asked in mixed) == 57565
    plain = {name: [[asked.prompt, asked.new_tokens] for asked in every] for name, every in requests.items()}
    del plain["beside 32k"]  # ours
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert digest.startswith("34553d7a18481b9c")


def test_ids_are_in_the_vocabulary_and_another_seed_asks_otherwise():
    small, other = (workloads(vocab_size=48, seed=seed, scale=0.1) for seed in (7, 8))
    assert all(max(asked.prompt) < 48 for every in small.values() for asked in every)
    assert all(small[name] != other[name] for name in small)


def test_arrivals_come_at_the_rate():
    times = poisson(4000, rate=20.0, seed=1)
    gaps = np.array([later - earlier for earlier, later in pairwise(times)])
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # as of an exponential distribution
    assert poisson(3, rate=None, seed=1) == [0, 0, 0]


def test_times_workloads_and_writes_where_they_come_from(tmp_path, capsys):
    file = tmp_path / "result.json"
    options = [*SHAPE, "--scale", "0.02", "--seed", "9", "--json", str(file)]
    assert bench_load.main([*options, "--stream", "--only", "single 512+256", "--only", "mixed 256"]) == 0
    result = json.loads(file.read_text())
    single, mixed = result["rows"]
    assert [single["name"], mixed["name"]] == ["single 512+256", "mixed 256"]
    assert (single["prompt_tokens"], single["new_tokens"]) == (10, 5)
    assert single["padding_share"] == 1 - 10 / 64
    assert mixed["requests"] == 5
    assert mixed["work"]["prompt_rows_used"] == mixed["prompt_tokens"]
    assert mixed["tokens_per_second"] == pytest.approx(mixed["new_tokens"] / mixed["total_ms"] * 1e3)
    for row in result["rows"]:
        assert 1 <= row["tokens_per_step"] <= 2
        assert 0 <= row["wait_ms"]["p50"] <= row["wait_ms"]["most"] < row["total_ms"]
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"] <= row["total_ms"]
        assert 0 < row["idle_share"] < 1
        assert row["floor_share"] > 0
        assert row["work"]["compiles"] == 0
    assert {"git_revision", "versions", "device"} <= result.keys()
    assert f"{mixed['new_tokens']:.0f}" in capsys.readouterr().out


def test_prompts_of_a_file_through_a_configuration(tmp_path, tiny_config):
    file, output = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    rows = [{"prompt": "a b"}, {"turns": ["c", "never asked"]}, {"prompt": [1, 2, 3]}, {"prompt": "too many"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    options = ["--input", str(file), "--limit", "3", "--max-new-tokens", "4", "--rate", "1000"]
    sizes = SIZES.replace("1024", "32").split()
    assert bench_load.main([str(tiny_config), "--k", "auto", *options, *sizes, "--json", str(output)]) == 0
    result = json.loads(output.read_text())
    (row,) = result["rows"]
    assert (row["name"], row["requests"], row["new_tokens"]) == ("prompts", 3, 12)
    assert result["synthetic_acceptance"] is None


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Made(SimpleNamespace):
    """A request, told apart by identity."""

    __hash__ = object.__hash__


class SlowEngine:
    """One token a second for every request."""

    def __init__(self, clock):
        self.clock, self.counters = clock, Counters()

    def make_request(self, prompt, params, *, is_streamed):
        return Made(prompt=prompt, max_new_tokens=params.max_new_tokens, token_ids=[], stats=None)

    def submit(self, requests, listener):
        now = self.clock.now
        for request in requests:
            request.token_ids = [0] * request.max_new_tokens
            request.arrived_at, request.first_token_at = now, now + 1
            request.finished_at = now + request.max_new_tokens

    def forget_prefixes(self):
        pass

    def wait_idle(self):
        return True


def test_requests_are_handed_over_when_they_are_due(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench.load, "time", clock)
    engine = SlowEngine(clock)
    asked = [Asked([0] * 4, 3), Asked([0] * 5, 1), Asked([0] * 6, 2)]
    run = bench.load.run(engine, asked, [0.0, 0.5, 10.0], SamplingParams())
    times = {a.prompt_tokens: (a.arrived, a.first_token_at, a.finished_at, a.tokens) for a in run.answers}
    assert times == {4: (100, 101, 103, 3), 5: (100.5, 101.5, 101.5, 1), 6: (110, 111, 112, 2)}
    assert run.seconds == 12


def test_figures_of_runs():
    def answered(arrived, first, last, tokens):
        waits = [0.5, 1.5] if tokens > 1 else []
        return Answered(arrived, first, last, 10, tokens, AcceptanceStats(), waits)

    work = Counters(prompt_rows=100, prompt_rows_used=25, slot_steps=50, slot_steps_used=40, steps=3)
    runs = [Run([answered(1, 2, 4, 5), answered(1.5, 3, end, 1)], work) for end in (5, 6, 8)]
    row = summary(runs, step_bytes=10, prompt_bytes=7, bandwidth=100)
    assert row["total_ms_runs"] == [4000, 5000, 7000]
    assert (row["total_ms"], row["tokens_per_second"]) == (5000, 6 / 5)
    assert row["first_token_ms"]["p50"] == 1250
    assert row["per_token_ms"] == {"p50": 500, "p99": 500}  # a single token has none
    assert row["wait_ms"] == {"p50": 1000, "p99": 1500, "most": 1500}
    assert (row["padding_share"], row["idle_share"]) == (0.75, pytest.approx(0.2))
    assert row["floor_share"] == pytest.approx(3 * 3 * 10 / 100 / 16)
    assert row["work"]["slot_steps"] == 150
    alone = summary(
        [Run([answered(0, 1, 1, 1)], Counters(prompt_passes=2))], step_bytes=10, prompt_bytes=7, bandwidth=100
    )
    assert (alone["per_token_ms"], alone["wait_ms"], alone["idle_share"]) == (None, None, None)
    assert alone["floor_share"] == pytest.approx(2 * 7 / 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either CONFIG or --shape (see --help)"),
        (["some", "--shape", "tiny"], "give either CONFIG or --shape (see --help)"),
        (["--shape", "tiny", "--repeats", "0"], "--repeats must be above 0, got 0 (see --help)"),
        (
            ["--shape", "tiny", "--engine", "slots=3"],
            "argument --engine: 'slots=3' is not NAME=VALUE for a field of EngineConfig (see --help)",
        ),
        ([*SHAPE, "--only", "mixed"], "--only: 'mixed' is unknown; known: 'ttft 512', 'ttft 4096', "),
        (
            [*SHAPE, "--only", "single 512+256", "--scale", "2"],
            "prompt of 1024 tokens leaves no room to answer: max_model_len is 1024",
        ),
        (
            [*SHAPE, "--only", "single 512+256", "--scale", "1.5"],
            "max_new_tokens: 384 do not fit: after a prompt of 768 tokens, max_model_len 1024 leaves",
        ),
    ],
)
def test_what_cannot_be_timed_is_one_line(capsys, options, message):
    try:
        status = bench_load.main(options)
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read {}: No such file or directory"), ("{]\n", "{} line 1: not JSON: ")],
)
def test_prompts_that_cannot_be_read_are_one_line(tmp_path, monkeypatch, capsys, content, message):
    monkeypatch.setattr(
        bench_load, "_load", lambda args: SimpleNamespace(max_model_len=64, num_speculative_tokens=0)
    )
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content, "utf-8")
    assert bench_load.main(["some-model", "--input", str(path), "--copy-bytes", "1000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message.format(path)}")
