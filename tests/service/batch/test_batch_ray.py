"""Ray on this machine: rows through two actors of the tiny model, and through engines without one."""

import json
import logging
import os
import re
import signal
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from fake_engine import FakeEngine
from programs_when_run import compile_only_what_runs
from pyarrow import parquet
from test_batch_replicas import SAMPLED, counts, refuse, rows, shown

from jaxspec import ConfigError, load
from jaxspec.commands import batch, batch_job
from jaxspec.installation import install_command
from jaxspec.service.batch import BatchRun, ReplicaError, ReplicaRun, Row, replicas
from jaxspec.service.batch.ray import Answerer, RayReplica, connect

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore:os.fork"
)

ON_RAY = [partial(RayReplica, {"num_cpus": 1})] * 2


@pytest.fixture(scope="module")
def cluster():
    """Ray with two CPUs, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
        )
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            # Its processes take seconds to start, so the next test finds them as the one before left them.
            _system_config={"kill_idle_workers_interval_ms": 0},
        )
    yield
    ray.shutdown()


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def die_once(marker):
    """Unless it has been here before."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Deadly(FakeEngine):
    """Its process dies of a certain row, once."""

    def __init__(self, marker):
        super().__init__(seconds=0.004)
        self._marker = marker

    def make_request(self, prompt, params, **options):
        if prompt == "deadly":
            die_once(self._marker)
        return super().make_request(prompt, params, **options)


class Raises(FakeEngine):
    def _run(self, requests):
        raise MemoryError("none left")


class Echo(FakeEngine):
    """Its answers are what it was asked."""

    def make_request(self, prompt, params, **options):
        request = super().make_request(prompt, params)
        request.asked = {"prompt": prompt, **options}
        return request

    def _answer(self, request):
        return replace(super()._answer(request), text=json.dumps(request.asked, sort_keys=True))


def load_echo(config, **options):
    return Echo()


def load_deadly(config, *, marker, **options):
    """The model, which kills its process when it is asked for the last row, once."""
    compile_only_what_runs()
    engine = load(config, **options)
    make_request = engine.make_request

    def make_or_die(prompt, *arguments, **more):
        if "w7 w7" in prompt:
            die_once(marker)
        return make_request(prompt, *arguments, **more)

    engine.make_request = make_or_die
    return engine


@pytest.mark.usefixtures("cluster")
def test_an_actor_dies_and_the_answers_are_those_of_one_engine(tmp_path):
    every = [*rows(50), Row("in.jsonl line 51", "deadly", "deadly")]
    alone = BatchRun(FakeEngine(), every, SAMPLED)
    expected = shown(alone)
    notes = []
    run = ReplicaRun(partial(Deadly, tmp_path / "died"), ON_RAY, every, SAMPLED, note=notes.append)
    with closing(run):
        run.start()
        ended = shown(run)
    (note,) = notes
    assert re.fullmatch(
        r"replica \d of 2 died: Worker unexpectedly exits.*; its rows are answered again", note
    )
    assert sorted(ended, key=str) == sorted(expected, key=str)
    assert counts(run) == counts(alone)


@pytest.mark.usefixtures("cluster")
def test_what_fails_in_an_actor_is_what_is_said(monkeypatch):
    """When it is loaded, and later; and not what Ray writes after it."""
    run = ReplicaRun(refuse, ON_RAY[:1], [], SAMPLED)
    with closing(run), pytest.raises(ReplicaError, match=r"^no such model$"):
        run.start()
    monkeypatch.setattr(replicas, "MAX_DEATHS", 1)
    run = ReplicaRun(Raises, ON_RAY[:1], [Row("line 1", 0, "w6")], SAMPLED)
    with closing(run):
        run.start()
        with pytest.raises(
            ReplicaError, match=r"^replica 1 of 1 died: MemoryError: none left; that was 1 times"
        ):
            list(run)


@pytest.mark.usefixtures("cluster")
def test_the_command_answers_as_with_one_engine(tiny_config, tiny_engine, tmp_path, monkeypatch, capsys):
    """With the tiny model, of which an actor dies."""
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": f"w{6 + i} w7"} if i % 3 else {"turns": [f"w{6 + i}", "w9"]} for i in range(39)]
    # One line, though there are characters in it that Python breaks lines at.
    lines.append({"id": "last", "prompt": "w7 w7 \u2028 \x85"})
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    options = ["--max-new-tokens", "8", "--ignore-eos", "--temperature", "1", "--seed", "3", "--keep-order"]

    def run(output, *more):
        files = ["--input", str(source), "--output", str(tmp_path / output)]
        summary = ["--summary", str(tmp_path / f"{output}.summary")]
        assert batch.main([str(tiny_config), *files, *summary, *options, *more]) == 0
        return json.loads((tmp_path / f"{output}.summary").read_text("utf-8"))

    with monkeypatch.context() as patch:
        patch.setattr(batch_job, "load", lambda config, **options: tiny_engine)
        alone = run("alone.jsonl")
    monkeypatch.setattr(batch_job, "load", partial(load_deadly, marker=tmp_path / "died"))
    summary = run("out.jsonl", "--ray", "--replicas", "2", "--batch-size", "2")
    assert (tmp_path / "died").exists()
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    for name in alone:
        if name not in ("command", "device", "seconds", "load_seconds", "tokens_per_second"):
            assert summary[name] == alone[name], name
    assert summary["device"] == "2 engines in a Ray cluster"
    assert "40: 40 answered, 0 failed" in capsys.readouterr().out


SAID = [{"role": "user", "content": "w6"}]
BODY = {"model": "m", "messages": SAID, "max_completion_tokens": 4}
OF_OPENAI = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
TEMPLATE = ["--chat-template-kwargs", '{"tone": "dry"}', "--continue-final-message"]
OPTIONS = {
    "of rows": (
        ["--n", "2", "--special-tokens-as-text", "--limit", "9", *TEMPLATE],
        [
            {"prompt": "w6"},
            {"turns": ["w6", "w7"]},
            {"messages": [*SAID, {"role": "assistant", "content": "w8"}], "n": 1},
            {"prompt": "w6", "n": 3, "logprobs": 1, "seed": 7, "special_tokens_as_text": False},
            OF_OPENAI,
            {**OF_OPENAI, "custom_id": "b", "url": "/v1/else"},
            {"prompt": "fail"},
            {"prompt": "w6", "turns": ["w6"]},
            {"prompt": "w6"},
            {"prompt": "behind the limit"},
        ],
    ),
    "of columns": (
        ["--prompt-key", "q", "--keep-columns"],
        [{"q": "w6", "label": 1}, {"q": SAID, "label": 2}],
    ),
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_of_one_engine_works(tiny_config, tmp_path, monkeypatch, capsys, case):
    """From a pipe, too, which can be read once."""
    options, lines = OPTIONS[case]
    monkeypatch.setattr(batch_job, "load", load_echo)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def run(name, *more):
        reading, writing = os.pipe()
        os.write(writing, text)
        os.close(writing)
        files = ["--input", f"/dev/fd/{reading}", "--output", str(tmp_path / name), "--keep-order"]
        status = batch.main([str(tiny_config), *files, *options, "--seed", "3", *more])
        os.close(reading)
        said = re.sub(r"/dev/fd/\d+", "in", capsys.readouterr().err)
        errors = [line for line in re.split("[\r\n]+", said) if line.startswith("error: ")]
        found = re.sub(r'"created": \d+', "", (tmp_path / name).read_text("utf-8"))
        return status, errors, re.sub(r'"(id|created)": ("chatcmpl-\w+"|\d+)', "", found)

    alone = run("alone.jsonl")
    assert alone[2]
    assert run("out.jsonl", "--ray", "--replicas", "1") == alone


@pytest.mark.usefixtures("cluster")
def test_a_run_is_resumed_here_or_there(tiny_config, tmp_path, monkeypatch):
    """And only with its settings."""
    monkeypatch.setattr(batch_job, "load", load_echo)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"w{6 + i}"}) + "\n" for i in range(9)), "utf-8")
    run = [str(tiny_config), "--input", str(source), "--output", str(output), "--keep-order"]
    on_ray = ["--ray", "--replicas", "1"]
    assert batch.main([*run, "--limit", "3", *on_ray]) == 0
    assert batch.main([*run, "--limit", "6", "--resume"]) == 0
    assert batch.main([*run, "--resume", "--raw", *on_ray]) == 2
    assert batch.main([*run, "--resume", *on_ray]) == 0
    found = read_lines(output)
    assert [row["id"] for row in found] == [*range(9)]
    (tmp_path / "again.jsonl").touch()
    run[4], seed = str(tmp_path / "again.jsonl"), json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert batch.main([*run, "--seed", str(seed["settings"]["seed"])]) == 0
    assert read_lines(tmp_path / "again.jsonl") == found


@pytest.mark.usefixtures("cluster")
def test_parquet_in_and_out(tiny_config, tmp_path, monkeypatch):
    """From a folder, at a URL, with a column that is kept."""
    monkeypatch.setattr(batch_job, "load", load_echo)
    for name, ids in {"a": [7, 2**40], "b": [9]}.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        table = pa.table(
            {"id": ids, "prompt": ["w6"] * len(ids), "made": pa.array([0] * len(ids), pa.date32())}
        )
        parquet.write_table(table, tmp_path / "in" / f"{name}.parquet")
    (tmp_path / "in" / "_SUCCESS").touch()
    run = [str(tiny_config), "--keep-columns", "made", "--keep-order", "--seed", "3"]
    for output, source, more in (
        ("alone.parquet", str(tmp_path / "in"), []),
        ("out.parquet", f"file://{tmp_path}/in", ["--ray", "--replicas", "1"]),
    ):
        assert batch.main([*run, "--input", source, "--output", str(tmp_path / output), *more]) == 0
    alone, found = (parquet.read_table(tmp_path / name) for name in ("alone.parquet", "out.parquet"))
    assert found.equals(alone)
    assert found.column("id").to_pylist() == [7, 2**40, 9]
    assert found.schema.field("made").type == pa.date32()


class Fake(Answerer):
    """Without a model."""

    def __init__(self):
        self._engine, self._params, self._raw = FakeEngine(), SAMPLED, False


def test_tables_of_rows_are_answered():
    """With rows that cannot be, which are not lost."""
    given = [
        {"id": 7, "prompt": "2024-01-01"},
        {"id": 2**40, "turns": ["w7", "w8"]},
        {"id": 9, "messages": [{"role": "user", "content": "w9"}]},
        {"id": 10, "prompt": "fail"},
        {"id": 11, "prompt": "w9", "turns": ["w9"]},
        {"id": 12, "prompt": "w9", "n": 2},
        {"prompt": "w9"},
    ]
    found = Fake()(
        pa.Table.from_pylist([{**dict.fromkeys(("turns", "messages", "n")), **row} for row in given])
    )
    found = found.to_pylist()
    alone = [Row("", 7, "2024-01-01"), Row("", 2**40, None, ("w7", "w8")), Row("", 9, given[2]["messages"])]
    expected = [answer.to_dict() for answer in BatchRun(FakeEngine(), alone, SAMPLED, keep_order=True)]
    for row, answer in zip(found, expected, strict=False):
        turns = [{**turn, "logprobs": None, "top_logprobs": None} for turn in answer.get("turns", [])]
        answer |= {"turns": turns or None}
        assert {name: row[name] for name in answer} == answer
    assert [row["error"] for row in found] == [
        None,
        None,
        None,
        "row 10: failed: it is a fake",
        "row 11: must have one of prompt, messages and turns, got prompt and turns",
        None,
        "row None: must have an id",
    ]
    assert [row["id"] for row in found] == [row.get("id") for row in given]
    assert [len(row["samples"] or ()) for row in found] == [0, 0, 0, 0, 0, 2, 0]


def test_rows_ask_for_several_answers_log_probabilities_and_a_schema(tiny_config):
    asked = [
        {"prompt": "w6", "n": 2, "logprobs": 1},
        {"prompt": "w6", "json_schema": {"type": "null"}},
        {"prompt": "w6", "json_schema": {"type": "nothing"}},
    ]
    answerer = Answerer(str(tiny_config), SAMPLED, batch_size=2)
    rows = [{"id": i, "json_schema": None, **row} for i, row in enumerate(asked)]
    several, null, refused = answerer(pa.Table.from_pylist(rows)).to_pylist()
    answerer._engine.close()
    samples = several["samples"]
    assert [len(each["logprobs"]) for each in samples] == [len(each["token_ids"]) for each in samples]
    assert len(samples) == 2
    assert null["text"] == "null"
    assert "json_schema at $: type must be among" in refused["error"]


@pytest.mark.parametrize("column", ["metadata", "made"])
def test_a_column_of_notes_is_not_looked_at_and_an_unknown_one_is_named(column):
    """Not even at dates that Python cannot hold."""
    made = pa.array([2**62], pa.timestamp("us"))
    (answer,) = Fake()(pa.table({"id": ["a"], column: made, "prompt": ["w6"]})).to_pylist()
    if column == "metadata":
        assert (answer["id"], answer["error"], len(answer["token_ids"])) == ("a", None, 8)
    else:
        assert answer["error"].startswith("row 'a': unknown key 'made'; known: id, prompt")


def test_columns_may_set_what_rows_may():
    """In a column of structs a null is a key that is not there."""
    columns = {
        "id": [0, 1],
        "prompt": ["w6", "w6"],
        "seed": [7, None],
        "max_new_tokens": [None, 3],
        "chat_template_kwargs": [{"think": True, "tone": None}, {"think": None, "tone": "dry"}],
        "logit_bias": [{"7": 1.0, "8": None}, {"7": None, "8": 2.0}],
    }
    answerer = Fake()
    first, second = answerer(pa.table(columns)).to_pylist()
    assert (first["error"], first["seed"], second["error"], len(second["token_ids"])) == (None, 7, None, 3)
    assert sorted(answerer._engine.template_kwargs, key=str) == [{"think": True}, {"tone": "dry"}]
    assert sorted(params.logit_bias for params in answerer._engine.params) == [((7, 1.0),), ((8, 2.0),)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--replicas", "9"], "9 engines need a CPU core each, and the cluster has 2"),
        (["--tensor-parallel", "2"], "engine.tensor_parallel is 2: the cluster has no GPUs"),
        (["--device", "cpu"], "--device: --ray gives every engine devices of its own; "),
    ],
)
def test_what_a_cluster_cannot_do_is_one_line(tiny_config, tmp_path, capsys, options, problem):
    (tmp_path / "in.jsonl").write_text('{"prompt": "w6"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert batch.main([str(tiny_config), *files, "--ray", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "nowhere.invalid:6379"])
def test_no_cluster_is_one_line(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=f"^--ray: no cluster at {address}: [^\n]+$"):
        connect(address)


def test_no_ray_is_one_line_that_says_how_to_get_it(tiny_config, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.jsonl").write_text("{}\n")
    from jaxspec.service.batch import ray as module

    monkeypatch.delattr("jaxspec.service.batch.ray")
    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setitem(sys.modules, "ray", None)
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert batch.main([str(tiny_config), *files, "--ray"]) == 2
    said = f"error: --ray: this needs ray, which is not installed: {install_command('ray')}\n"
    assert capsys.readouterr().err == said
