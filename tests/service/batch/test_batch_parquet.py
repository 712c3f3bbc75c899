"""Parquet in and out of `jaxspec batch`, without Ray, with an engine without a model."""

import fcntl
import json
import sys
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_engine import FakeEngine

from jaxspec.commands import batch, batch_job
from jaxspec.installation import install_command
from jaxspec.service.batch import parquet
from jaxspec.service.rows import Form, InputError, Row, count_rows, may_sample, read_rows

ROWS = [
    {"id": "a", "prompt": "w6", "temperature": 0.5, "label": 1, "at": datetime(2024, 2, 3)},
    {"id": "b", "prompt": "w7", "temperature": None, "label": None, "at": None},
    {"id": "c", "prompt": None, "temperature": None, "label": 3, "at": None},
    {"id": "d", "prompt": "w9", "temperature": 1.0, "label": 4, "at": None},
]


@pytest.fixture
def run(tmp_path, tiny_config, monkeypatch):
    """Runs the command over rows; returns its exit status and the output's path."""
    monkeypatch.setattr(batch_job, "load", lambda config, **options: FakeEngine())

    def start(*options, rows=ROWS, output="out.parquet", source="in.parquet"):
        if source.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / source)
        else:
            (tmp_path / source).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        files = ["--input", str(tmp_path / source), "--output", str(tmp_path / output)]
        words = ["--keep-order", "--max-new-tokens", "3", "--seed", "5", *files, *options]
        return batch.main([str(tiny_config), *words]), tmp_path / output

    return start


def test_rows_of_a_file_are_read_as_lines_are(tmp_path):
    path, lines = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    messages = [[{"role": "user", "content": "hi", "name": None}], None, None, None]
    columns = {
        "messages": messages,
        "prompt": pa.array([None, "w6", None, "w7"]),
        "turns": pa.array([None, None, ["a", "b"], None]),
        "n": [2, None, None, -1],
        "stop": pa.array([["x"], None, None, None]),
        "chat_template_kwargs": pa.array([{"a": 1, "b": None}, None, None, None]),
        "logit_bias": pa.array([{"5": 1.5, "7": None}, {"5": None, "7": -1.0}, None, None]),
        "source": pa.array([datetime(2024, 1, 1)] * 4),
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    same = [
        {
            "messages": messages[0],
            "n": 2,
            "stop": ["x"],
            "chat_template_kwargs": {"a": 1},
            "logit_bias": {"5": 1.5},
        },
        {"prompt": "w6", "logit_bias": {"7": -1.0}},
        {"turns": ["a", "b"]},
    ]
    lines.write_text("\n".join(map(json.dumps, same)), "utf-8")
    *found, bad = read_rows(path)
    expected = list(read_rows(lines))
    assert all(isinstance(row, Row) for row in found)
    assert [(row.id, row.digest) for row in found] == [(row.id, row.digest) for row in expected]
    assert str(bad) == f"{path} row 4: n must be an integer, 1 or more, got -1"
    assert count_rows(path, lines) == 7
    assert [row.id for row in read_rows(lines, path) if isinstance(row, Row)] == [0, 1, 2, 3, 4, 5]
    assert not may_sample(path)


def test_a_row_has_nothing_of_the_others_keys_at_any_depth(tmp_path):
    """A struct in a column has the keys of every row, and those of other rows are null."""

    def row(**parameters):
        function = {"name": "f", "parameters": {"type": "object", "properties": parameters}}
        call = {"function": {"name": "f", "arguments": dict.fromkeys(parameters, "x")}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        tools = [{"type": "function", "function": function}]
        return {"messages": messages, "chat_template_kwargs": {"tools": tools}, "note": {"a": [parameters]}}

    rows = [row(city={"type": "string"}), row(amount={"type": "number", "minimum": 0})]
    path, lines = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    pq.write_table(pa.Table.from_pylist(rows), path)
    lines.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    form = Form(kept=("note",))
    found, expected = list(read_rows(path, form=form)), list(read_rows(lines, form=form))
    assert [(row.prompt, row.chat_template_kwargs) for row in found] == [
        (row.prompt, row.chat_template_kwargs) for row in expected
    ]
    assert [row.digest for row in found] == [row.digest for row in expected]
    # What is kept is as the file has it.
    assert found[0].kept["note"]["a"][0]["amount"] is None


def test_a_column_that_samples_is_known_before_rows_are_read(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    assert may_sample(tmp_path / "in.parquet")


def test_answers_are_those_to_lines_and_columns_are_kept(run, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP", 2)
    status, output = run("--keep-columns", "label", "at")
    assert status == 1  # one row has no prompt
    table = pq.read_table(output)
    assert table.column_names[:4] == ["id", "label", "at", "input_digest"]
    assert table.schema.field("at").type == pa.timestamp("us")
    found = table.to_pylist()
    assert [(row["id"], row["label"], row["at"]) for row in found] == [
        (row["id"], row["label"], row["at"]) for row in ROWS if row["prompt"]
    ]
    assert pq.ParquetFile(output).num_row_groups == 2
    assert not list(output.parent.glob("*.part"))
    assert json.loads((output.parent / "out.parquet.run.json").read_text("utf-8"))["settings"]["seed"] == 5
    plain = [{k: v for k, v in row.items() if k not in ("label", "at") and v is not None} for row in ROWS]
    run(rows=plain, source="in.jsonl", output="out.jsonl")
    lines = [json.loads(line) for line in (output.parent / "out.jsonl").read_text("utf-8").splitlines()]
    for row, line in zip(found, lines, strict=True):
        assert {name: row[name] for name in line} == line


def test_several_answers_with_log_probabilities(tmp_path):
    top = [{"5": -0.1, "7": -2.0}, {}]
    one = {"text": "a", "token_ids": [5, 6], "logprobs": [-0.1, -0.2], "top_logprobs": top, "seed": 2**64 - 1}
    output = parquet.ParquetFile(tmp_path / "out.parquet", pa.schema({"id": pa.int64()}))
    output.begin({}, {})
    output.append({"id": 1, **one, "samples": [one, {**one, "text": "b"}]})
    output.close()
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist(maps_as_pydicts="strict")
    assert {name: row[name] for name in one} == one
    assert [sample["text"] for sample in row["samples"]] == ["a", "b"]
    assert row["turns"] is None


def test_parquet_becomes_lines_as_far_as_json_goes(run, capsys):
    timeless = [{name: value for name, value in row.items() if name != "at"} for row in ROWS]
    status, output = run("--keep-columns", "label", output="out.jsonl", rows=timeless)
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert (status, [row["label"] for row in rows]) == (1, [1, None, 4])
    assert run("--keep-columns", output="other.jsonl")[0] == 2
    assert "at: JSON lines cannot keep a column of timestamp[us]; Parquet can" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "more", "problem"),
    [
        (["--resume"], {}, "--resume: .*out.parquet is finished as a whole; only JSON lines are continued"),
        (
            [],
            {"source": "in.jsonl", "rows": [{"prompt": "w6"}]},
            "needs Parquet as input, whose columns it has",
        ),
        ([], {}, "in.parquet: unknown column 'label'; known: id, prompt"),
        (["--keep-columns", "text"], {"rows": [{"prompt": "a", "text": "b"}]}, "'text' cannot be kept"),
        (
            [],
            {"rows": [{"prompt": "a", "id": 1.5}]},
            "id must be a column of texts or whole numbers, not of double",
        ),
        (["--limit", "0"], {}, "--limit must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(run, capsys, options, more, problem):
    status, output = run(*options, **more)
    assert (status, output.exists()) == (2, False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(said)


def test_an_output_belongs_to_one_run(run, capsys):
    rows = [{"prompt": "w6"}]
    status, output = run(rows=rows)
    assert status == 0
    content = output.read_bytes()
    assert run(rows=rows)[0] == 2
    assert "out.parquet exists: give another --output" in capsys.readouterr().err
    assert output.read_bytes() == content
    output.unlink()
    part = output.with_name("out.parquet.part")
    part.write_bytes(b"of a run that was killed")
    assert run(rows=rows)[0] == 0
    output.unlink()
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(rows=rows)[0] == 2
    assert "out.parquet: another run is writing it" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_it_has_answered(run, monkeypatch, capsys):
    append, kept = parquet.ParquetFile.append, []

    def interrupted(output, record):
        append(output, record)
        kept.append(record["id"])
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(parquet.ParquetFile, "append", interrupted)
    status, output = run("--keep-columns")
    assert status == 130
    assert pq.read_table(output).column("id").to_pylist() == kept == ["a", "b"]
    assert "holds what was finished, up to the first row that was not\n" in capsys.readouterr().err


def test_without_pyarrow_one_line_names_the_extra(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert run(rows=[{"prompt": "w6"}])[0] == 2
    expected = f"error: this needs pyarrow, which is not installed: {install_command('parquet')}\n"
    assert capsys.readouterr().err == expected


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "in.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=f"^cannot read {path}: "):
        list(read_rows(path))
