"""Ray on this machine: rows through two actors of the tiny model, and through engines without one."""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from fake_engine import FakeEngine
from programs_when_run import compile_only_what_runs
from pyarrow import parquet

from jaxspec import ConfigError, EngineError, SamplingParams
from jaxspec.commands import batch, batch_job
from jaxspec.installation import install_command
from jaxspec.service.batch import BatchRun, InputError, Row

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore:os.fork"
)

SAMPLED = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def cluster():
    """Ray with two CPUs, whatever this machine has."""
    import ray.data

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
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
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    yield
    ray.shutdown()


def read_lines(path):
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_text("utf-8").split("\n") if line]


@pytest.mark.usefixtures("cluster")
def test_an_actor_is_killed_and_the_answers_are_those_of_one_process(
    tiny_config, tiny_engine, tmp_path, monkeypatch, capsys
):
    from jaxspec.service.batch import ray as on_ray

    class KilledOnce(on_ray.LineAnswerer):
        """The first that begins its second batch dies of it."""

        def __init__(self, *arguments, **options):
            compile_only_what_runs()
            super().__init__(*arguments, **options)

        def __call__(self, table, marker=tmp_path / "killed"):
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == 2:
                try:
                    marker.touch(exist_ok=False)
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(table)

    source = tmp_path / "in.jsonl"
    lines = [{"prompt": f"w{6 + i} w7"} if i % 3 else {"turns": [f"w{6 + i}", "w9"]} for i in range(39)]
    # One line, though there are characters in it that Python breaks lines at.
    lines.append({"id": "last", "prompt": "w6 \u2028 \x85 w7"})
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    options = ["--max-new-tokens", "8", "--ignore-eos", "--temperature", "1", "--seed", "3"]

    def run(output, *more):
        files = ["--input", str(source), "--output", str(tmp_path / output)]
        summary = ["--summary", str(tmp_path / f"{output}.summary")]
        assert batch.main([str(tiny_config), *files, *summary, *options, *more]) == 0
        return json.loads((tmp_path / f"{output}.summary").read_text("utf-8"))

    with monkeypatch.context() as patch:
        patch.setattr(batch_job, "load", lambda config, **options: tiny_engine)
        alone = run("alone.jsonl")
    monkeypatch.setattr(on_ray, "LineAnswerer", KilledOnce)
    summary = run("out", "--ray", "--replicas", "2", "--batch-size", "2")
    assert (tmp_path / "killed").exists()

    expected, found = read_lines(tmp_path / "alone.jsonl"), read_lines(tmp_path / "out")
    assert len(found) == 40
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert {row["id"] for row in found} == {*range(39), "last"}
    for name in alone:
        if name not in ("command", "device", "seconds", "load_seconds", "tokens_per_second"):
            assert summary[name] == alone[name], name
    assert "40: 40 answered, 0 failed" in capsys.readouterr().out


@pytest.mark.usefixtures("cluster")
def test_parquet_in_and_out(tmp_path, monkeypatch):
    """With rows that cannot be answered, which are not lost."""
    from jaxspec.service.batch import ray as on_ray

    class Fake(on_ray.Answerer):
        def __init__(self, params, **options):
            self._engine, self._params, self._raw = FakeEngine(4), params, False

    rows = [
        {"id": 7, "prompt": "2024-01-01"},
        {"id": 2**40, "turns": ["w7", "w8"]},
        {"id": 9, "messages": [{"role": "user", "content": "w9"}]},
        {"id": 10, "prompt": "fail"},
        {"id": 11, "prompt": "w9", "turns": ["w9"]},
        {"id": 12, "prompt": "w9", "n": 2},
        {"prompt": "w9"},
    ]
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(
        pa.Table.from_pylist(
            rows,
            pa.schema(
                {
                    "id": pa.int64(),
                    "n": pa.int64(),
                    "prompt": pa.string(),
                    "turns": pa.list_(pa.string()),
                    "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
                }
            ),
        ),
        source,
    )
    monkeypatch.setattr(on_ray, "Answerer", Fake)
    summary = on_ray.answer_files(
        [str(source)],
        str(output),
        share=on_ray.Share(1, {"num_cpus": 1}),
        slots=2,
        keep_order=True,
        params=SAMPLED,
    )
    found = parquet.read_table(output).to_pylist()
    alone = [Row("", 7, "2024-01-01"), Row("", 2**40, None, ("w7", "w8")), Row("", 9, rows[2]["messages"])]
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
    assert [row["id"] for row in found] == [row.get("id") for row in rows]
    assert (summary.rows, summary.answered, summary.tokens) == (7, 4, 6 * 8)
    assert sorted(summary.failures) == sorted(row["error"] for row in found if row["error"])
    assert [len(row["samples"] or ()) for row in found] == [0, 0, 0, 0, 0, 2, 0]


@pytest.mark.usefixtures("cluster")
def test_lines_are_numbered_in_a_single_file_alone(tmp_path):
    """Numbers of several files would be the same ids; a URL does not say that it is a folder of them."""
    from jaxspec.service.batch import ray as on_ray

    (tmp_path / "a.jsonl").write_text("{}\n{}\n")

    def numbers(source):
        with source._open_input_source(source._filesystem, str(tmp_path / "a.jsonl")) as file:
            (table,) = source._read_stream(file, "a.jsonl")
        return table.column("number").to_pylist()

    assert numbers(on_ray.LineSource([f"file://{tmp_path}"])) == [0, 1]
    (tmp_path / "b.jsonl").write_text("{}\n")
    for folder in str(tmp_path), f"file://{tmp_path}":
        assert numbers(on_ray.LineSource([folder])) == [None, None]
    assert numbers(on_ray.LineSource([f"file://{tmp_path}/a.jsonl"])) == [0, 1]


def test_rows_ask_for_several_answers_log_probabilities_and_a_schema(tiny_config):
    from jaxspec.service.batch import ray as on_ray

    asked = [
        {"prompt": "w6", "n": 2, "logprobs": 1},
        {"prompt": "w6", "json_schema": {"type": "null"}},
        {"prompt": "w6", "json_schema": {"type": "nothing"}},
    ]
    lines = on_ray.LineAnswerer(str(tiny_config), SAMPLED, batch_size=2)
    table = pa.table(
        {
            "place": ["line 1", "line 2", "line 3"],
            "line": pa.array([json.dumps(row).encode() for row in asked], pa.large_binary()),
            "number": [0, 1, 2],
        }
    )
    of_lines = [json.loads(line) for line in lines(table).column("line").to_pylist()]
    lines._engine.close()
    columns = on_ray.Answerer(str(tiny_config), SAMPLED, batch_size=2)
    rows = [{"id": i, "json_schema": None, **row} for i, row in enumerate(asked)]
    of_columns = columns(pa.Table.from_pylist(rows))
    columns._engine.close()
    for several, null, refused in (of_lines, of_columns.to_pylist()):
        samples = several["samples"]
        assert [len(each["logprobs"]) for each in samples] == [len(each["token_ids"]) for each in samples]
        assert len(samples) == 2
        assert null["text"] == "null"
        assert "json_schema at $: type must be among" in refused["error"]


@pytest.mark.usefixtures("cluster")
def test_a_limit_takes_the_first_rows(tmp_path, monkeypatch):
    """Of many files, which Ray finds and reads in any order."""
    from jaxspec.service.batch import ray as on_ray

    for name in "abcdefgh":
        ids = [f"{name}{number}" for number in range(2)]
        parquet.write_table(pa.table({"id": ids, "prompt": ids}), tmp_path / f"{name}.parquet")
    read, found = on_ray._read, []

    def read_now(paths, is_parquet):
        found.extend(row["id"] for row in read(paths, is_parquet).limit(7).take_all())
        raise ValueError("that is all")

    monkeypatch.setattr(on_ray, "_read", read_now)
    files = [str(tmp_path / f"{name}.parquet") for name in "hgfedcba"]
    with pytest.raises(InputError, match="that is all"):
        on_ray.answer_files(files, "out", params=SAMPLED, share=on_ray.Share(1, {}), slots=2, limit=7)
    assert found == ["h0", "h1", "g0", "g1", "f0", "f1", "e0"]


def test_a_folder_is_of_its_files_format(tmp_path):
    """Whatever its name, and however deep they lie."""
    from jaxspec.service.batch import ray as on_ray

    (tmp_path / "rows" / "train").mkdir(parents=True)
    assert not on_ray._is_parquet([str(tmp_path / "rows"), "s3://rows"])
    (tmp_path / "rows" / "train" / "0.parquet").touch()
    assert on_ray._is_parquet([str(tmp_path / "rows"), "s3://rows.parquet/"])
    with pytest.raises(InputError, match="cannot be mixed"):
        on_ray._is_parquet([str(tmp_path / "rows"), "s3://rows"])


@pytest.mark.parametrize("column", ["metadata", "made"])
def test_a_column_of_notes_is_not_looked_at_and_an_unknown_one_is_named(column):
    """Not even at dates that Python cannot hold."""
    from jaxspec.service.batch import ray as on_ray

    class Fake(on_ray.Answerer):
        def __init__(self):
            self._engine, self._params, self._raw = FakeEngine(), SAMPLED, False

    made = pa.array([2**62], pa.timestamp("us"))
    (answer,) = Fake()(pa.table({"id": ["a"], column: made, "prompt": ["w6"]})).to_pylist()
    if column == "metadata":
        assert (answer["id"], answer["error"], len(answer["token_ids"])) == ("a", None, 8)
    else:
        assert answer["error"].startswith("row 'a': unknown key 'made'; known: id, prompt")


def test_columns_may_set_what_rows_may():
    """In a column of structs a null is a key that is not there."""
    from jaxspec.service.batch import ray as on_ray

    class Fake(on_ray.Answerer):
        def __init__(self):
            self._engine, self._params, self._raw = FakeEngine(), SAMPLED, False

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
        (["--resume"], "--resume cannot be used with --ray"),
        (["--input", "-"], "--input: --ray needs files or folders that every machine of the cluster"),
        (
            ["--input", "in.jsonl", "openai.jsonl"],
            "--input openai.jsonl: lines of OpenAI's batch files cannot be used with --ray",
        ),
        (["--input", "no.jsonl"], "cannot read no.jsonl: No such file or directory"),
        (
            ["--input", "in.jsonl", "in.parquet"],
            "--input: Parquet and JSON lines cannot be mixed",
        ),
        (["--output", "out.parquet"], "{folder}/out.parquet: the output is JSON lines, as the input is"),
        (["--output", "there"], "there exists: --ray needs a new folder"),
        (["--input", "there"], "cannot read {folder}/there: No files found"),
        (["--input", "in.parquet"], "cannot read {folder}/in.parquet: Parquet file size is 3 bytes"),
        (["--input", "file:///missing.jsonl"], "cannot read file:///missing.jsonl: /missing.jsonl"),
        (["--output", "in.jsonl/out"], "cannot write {folder}/in.jsonl/out: "),
    ],
)
def test_what_ray_cannot_do_is_one_line(tiny_config, tmp_path, monkeypatch, capsys, options, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for name in "in.jsonl", "in.parquet":
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "openai.jsonl").write_text('{"custom_id": "a"}\n')
    files = ["--input", "in.jsonl", "--output", "out"]
    assert batch.main([str(tiny_config), *files, "--ray", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem.format(folder=tmp_path)}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore:The minimum number of concurrent actors:UserWarning")
def test_an_input_without_rows_is_one_line(tiny_config, tmp_path, monkeypatch, capsys):
    from jaxspec.service.batch import ray as on_ray

    class Fake(on_ray.LineAnswerer):
        def __init__(self, **options):
            pass

    monkeypatch.setattr(on_ray, "LineAnswerer", Fake)
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    files = ["--input", str(source), "--output", str(tmp_path / "out")]
    assert batch.main([str(tiny_config), *files, "--ray"]) == 2
    assert capsys.readouterr().err == f"error: {source}: no rows\n"


@pytest.mark.usefixtures("cluster")
def test_what_fails_in_an_actor_is_what_is_said(tmp_path, monkeypatch):
    """And not what Ray writes after it."""
    from jaxspec.service.batch import ray as on_ray

    class Fails(on_ray.LineAnswerer):
        def __init__(self, **options):
            pass

        def _records(self, rows):
            raise EngineError("the engine is closed")

    (tmp_path / "in.jsonl").write_text('{"prompt": "w6"}\n')
    monkeypatch.setattr(on_ray, "LineAnswerer", Fails)
    share = on_ray.Share(1, {"num_cpus": 1})
    with pytest.raises(EngineError, match=r"^Ray: jaxspec\.\S+\.EngineError: the engine is closed$"):
        on_ray.answer_files(
            [str(tmp_path / "in.jsonl")], str(tmp_path / "out"), params=SAMPLED, share=share, slots=2
        )


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "nowhere.invalid:6379"])
def test_no_cluster_is_one_line(monkeypatch, address):
    from jaxspec.service.batch import ray as on_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=f"^--ray: no cluster at {address}: [^\n]+$"):
        on_ray.connect(address)


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
