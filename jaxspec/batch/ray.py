"""Batch runs on a Ray cluster: Ray Data reads, distributes, retries and writes rows.

Only two parts are ours: an engine that answers batches, and a reader and a writer of raw lines. Of Ray's two
readers of JSON lines, one parses texts as dates and the other splits lines inside texts.
"""

import io
import json
import os
import re
import runpy
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource

from jaxspec.batch.answer import Answer
from jaxspec.batch.devices import thread_limits
from jaxspec.batch.output import OutputError
from jaxspec.batch.run import BatchRun
from jaxspec.batch.summary import MAX_FAILURES
from jaxspec.config import ConfigError
from jaxspec.engine import AcceptanceStats, EngineError
from jaxspec.engine.load import load
from jaxspec.errors import one_line
from jaxspec.rows import KEYS, MAX_LINE, NOTES, InputError, Row, RowError, make_row, parse_line
from jaxspec.sampling import SamplingParams

_BATCHES_AT_ONCE = 2
_LINES_AT_ONCE = 1024
_SECONDS_TO_CONNECT = 10.0

_STATS = pa.struct(
    {
        "steps": pa.int64(),
        "draft_steps": pa.int64(),
        "drafted": pa.int64(),
        "accepted": pa.int64(),
        "accepted_at": pa.list_(pa.int64()),
        "drafted_at": pa.list_(pa.int64()),
        "reached_at": pa.list_(pa.int64()),
        "acceptance_length": pa.float64(),
        "acceptance_per_position": pa.list_(pa.float64()),
        "conditional_acceptance": pa.list_(pa.float64()),
    }
)
_GENERATION = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "prompt_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "seed": pa.uint64(),
    "stats": _STATS,
}
ANSWER_COLUMNS = {
    "input_digest": pa.string(),
    **_GENERATION,
    "turns": pa.list_(pa.struct(_GENERATION)),
    "error": pa.string(),
}
"""The columns that `Answerer` returns in addition to "id": the keys of an output row, and "error", which is
null in answered rows."""


class Answerer:
    """An engine that answers tables of rows, for `ray.data.Dataset.map_batches`; every actor has one.

        dataset.map_batches(
            Answerer,
            fn_constructor_kwargs={"model": "qwen3-8b-eagle3", "params": SamplingParams(seed=1)},
            batch_format="pyarrow", batch_size=64, num_gpus=1, compute=ActorPoolStrategy(size=4),
        )

    Draws are seeded by the run's seed and the row's id (`row_seed`), so a row that is retried gets the same
    answer. Several threads may call it.
    """

    def __init__(
        self,
        model: str | Path,
        params: SamplingParams,
        *,
        raw: bool = False,
        imports: Sequence[str] = (),
        cores: int | None = None,
        **options: Any,
    ):
        """Loads the engine.

        Args:
          model: as in `jaxspec.load`.
          params: as in `BatchRun`, with the run's seed.
          raw: pass text prompts without the chat template.
          imports: Python files to run first.
          cores: number of CPU cores to use; None for all.
          **options: passed to `jaxspec.load`.

        Raises:
          ValueError: `params` has no seed.
        """
        if params.seed is None:
            raise ValueError("params: a seed is required, the same for every actor")
        if cores is not None:
            os.environ.update(thread_limits(cores))
        self._params = params
        self._raw = raw
        for path in imports:
            runpy.run_path(path)
        self._engine = load(model, progress=False, **options)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answers rows.

        Args:
          table: columns "id" (unique strings or integers) and others that rows may have
            (`jaxspec.rows.read_rows`). A null is a key that the row does not have.

        Returns:
          Columns "id" and `ANSWER_COLUMNS`, one row for each row of `table`.
        """
        unknown = {name: True for name in table.column_names if name not in KEYS}
        # Of columns that are not looked at, Python may be unable to hold the values.
        asked = table.select([name for name in KEYS if name in table.column_names and name not in NOTES])
        given = [_without_nulls(row) for row in asked.to_pylist()]
        rows = [_row(f"row {values.get('id')!r}", {**values, **unknown}) for values in given]
        id_type = table.schema.field("id").type if "id" in table.column_names else pa.null()
        answers = zip(given, self._records(rows), strict=True)
        records = [{**record, "id": values.get("id")} for values, record in answers]
        return pa.Table.from_pylist(records, pa.schema({"id": id_type, **ANSWER_COLUMNS}))

    def _records(self, rows: Sequence[Row | RowError]) -> list[dict[str, Any]]:
        """An output row for each row, in order; for a failed row, its id and "error"."""
        run = BatchRun(self._engine, rows, self._params, raw=self._raw, keep_order=True)
        return [
            ended.to_dict()
            if isinstance(ended, Answer)
            else {**({"id": row.id} if isinstance(row, Row) else {}), "error": str(ended)}
            for row, ended in zip(rows, run, strict=True)
        ]


class LineAnswerer(Answerer):
    """Like `Answerer`, but takes and returns lines of JSON, whose ids may mix strings and integers."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answers a table of `LineSource`; returns a table with one column, "line" (string)."""
        rows = [_row_of_line(**values) for values in table.to_pylist()]
        lines = [json.dumps(record, ensure_ascii=False) for record in self._records(rows)]
        return pa.table({"line": pa.array(lines, pa.string())})


class LineSource(FileBasedDatasource):
    """Reads the lines of files that are not blank.

    Columns: "place" (string, for messages), "line" (bytes) and "number" (of the line, from 0, if there is
    only one file; otherwise null).
    """

    def __init__(self, paths: Sequence[str]):
        super().__init__(list(paths))
        self._has_numbers = len(self._paths()) == 1

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[pa.Table]:
        lines = ((number, line) for number, line in enumerate(io.BufferedReader(f)) if line.strip())
        while some := list(islice(lines, _LINES_AT_ONCE)):
            numbers = [number if self._has_numbers else None for number, _ in some]
            yield pa.table(
                {
                    "place": [f"{path} line {number + 1}" for number, _ in some],
                    "line": pa.array([line for _, line in some], pa.large_binary()),
                    "number": pa.array(numbers, pa.int64()),
                }
            )


class LineSink(BlockBasedFileDatasink):
    """Writes a column "line" as files of lines."""

    def __init__(self, folder: str):
        super().__init__(folder, file_format="jsonl")

    def write_block_to_file(self, block: Any, file: pa.NativeFile) -> None:
        for line in block.to_arrow().column("line").to_pylist():
            file.write(line.encode("utf-8") + b"\n")


@dataclass
class Counts:
    """Totals over the rows of an output.

    Attributes:
      rows, answered: numbers of rows.
      failures: the errors of the first `MAX_FAILURES` failed rows.
      tokens, prompt_tokens: totals over all turns of all answers.
      stats: acceptance statistics of all answers.
    """

    rows: int = 0
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Adds one output row."""
        self.rows += 1
        if record.get("error") is not None:
            self.failures = [*self.failures, record["error"]][:MAX_FAILURES]
            return
        self.answered += 1
        self.stats.add(AcceptanceStats.from_dict(record["stats"]))
        for turn in record.get("turns") or [record]:
            self.tokens += len(turn["token_ids"])
            self.prompt_tokens += turn["prompt_tokens"]

    def add(self, other: "Counts") -> None:
        """Adds the totals of other rows."""
        self.rows += other.rows
        self.answered += other.answered
        self.failures = [*self.failures, *other.failures][:MAX_FAILURES]
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.stats.add(other.stats)


def connect(address: str | None) -> None:
    """Joins a cluster, or starts one on this machine; does nothing if Ray is already initialised.

    Args:
      address: as in `ray.init`; None joins the cluster that RAY_ADDRESS names, if it is set.

    Raises:
      ConfigError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        # Checked first, because Ray retries for minutes and then ends the process.
        try:
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--ray: no cluster at {address}: {error}") from None
    try:
        ray.init(address, include_dashboard=False if address is None else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--ray: {error}") from None


@dataclass(frozen=True)
class Share:
    """How a cluster is divided among engines.

    Attributes:
      actors: number of engines.
      resources: the resources that each actor requests from Ray.
      cores: CPU cores that each engine uses; None on GPUs.
    """

    actors: int
    resources: dict[str, Any]
    cores: int | None = None


def share_cluster(actors: int | None, tensor_parallel: int) -> Share:
    """Divides the cluster among engines.

    Args:
      actors: number of engines; None for as many as the GPUs allow, or one per machine without GPUs.
      tensor_parallel: devices per engine.

    Raises:
      ConfigError: the cluster does not have enough devices or cores.
    """
    resources = ray.cluster_resources()
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if gpus:
        actors = actors or max(gpus // tensor_parallel, 1)
        if actors * tensor_parallel > gpus:
            each = "a GPU" if tensor_parallel == 1 else f"{tensor_parallel} GPUs"
            raise ConfigError(f"{actors} engines of {each} each: the cluster has {gpus}")
        return Share(actors, {"num_gpus": tensor_parallel})
    if tensor_parallel > 1:
        raise ConfigError(f"engine.tensor_parallel is {tensor_parallel}: the cluster has no GPUs")
    machines = sum(node["Alive"] for node in ray.nodes())
    actors = actors or machines
    if actors > cores:
        raise ConfigError(f"{actors} engines need a CPU core each, and the cluster has {cores}")
    # One core is left for reading and writing, which would never be scheduled otherwise.
    num_cpus = min((cores - 1) / actors, 1) if cores > 1 else 0
    return Share(actors, {"num_cpus": num_cpus}, max(cores // max(actors, machines), 1))


def answer_files(
    inputs: Sequence[str],
    output: str,
    *,
    share: Share,
    slots: int,
    keep_order: bool = False,
    limit: int | None = None,
    **answerer: Any,
) -> Counts:
    """Answers the rows of files; writes a folder of files of the same format.

    Args:
      inputs: files or folders, either all Parquet (".parquet") or all JSON lines.
      output: a folder that does not exist yet.
      share: from `share_cluster`.
      slots: rows that an engine answers at once.
      keep_order: write rows in the order of the input.
      limit: answer only so many rows.
      **answerer: arguments of `Answerer`.

    Returns:
      Totals over all rows.

    Raises:
      InputError: inputs of both formats, that cannot be read, or with a column that rows cannot have.
      OutputError: the folder cannot be made, or has the name of the other format.
      EngineError: Ray failed.
    """
    is_parquet = _is_parquet(inputs)
    if output.rstrip("/").endswith(".jsonl" if is_parquet else ".parquet"):
        kind = "Parquet" if is_parquet else "JSON lines"
        raise OutputError(f"{output}: the output is {kind}, as the input is")
    context = ray.data.DataContext.get_current()
    # Without order, a limit would take the rows of any file.
    context.execution_options.preserve_order = keep_order or limit is not None
    # Without a terminal, Ray writes twelve lines every ten seconds instead of progress bars.
    context.enable_progress_bars = context.enable_progress_bars and sys.stderr.isatty()
    try:
        rows = _read(inputs, is_parquet)
    except (OSError, ValueError, pa.ArrowException, ray.exceptions.RayError) as error:
        raise InputError(one_line(f"cannot read {', '.join(inputs)}: {_cause(error)}")) from None
    if is_parquet and (unknown := [name for name in rows.columns() or () if name not in KEYS]):
        raise InputError(f"{', '.join(inputs)}: unknown column {unknown[0]!r}; known: {', '.join(KEYS)}")
    try:
        if limit is not None:
            rows = rows.limit(limit)
        # Small batches, because a batch is repeated if its actor is lost.
        batch_size = 2 * slots
        answers = rows.repartition(target_num_rows_per_block=batch_size).map_batches(
            Answerer if is_parquet else LineAnswerer,
            fn_constructor_kwargs={**answerer, "cores": share.cores},
            batch_format="pyarrow",
            batch_size=batch_size,
            # While one batch finishes, the next fills the free slots.
            compute=ray.data.ActorPoolStrategy(
                size=share.actors,
                max_concurrent_calls_per_actor=_BATCHES_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            udf_modifying_row_count=False,
            **share.resources,
        )
        if is_parquet:
            answers.write_parquet(output)
        else:
            answers.write_datasink(LineSink(output))
        return _count(output, is_parquet)
    except ray.exceptions.RayError as error:
        raise EngineError(one_line(f"Ray: {_cause(error)}")) from None
    except OSError as error:
        raise OutputError(one_line(f"cannot write {output}: {error}")) from None


def _read(paths: Sequence[str], is_parquet: bool, columns: list[str] | None = None) -> ray.data.Dataset:
    if is_parquet:
        return ray.data.read_parquet(list(paths), columns=columns)
    return ray.data.read_datasource(LineSource(paths))


def _count(output: str, is_parquet: bool) -> Counts:
    """Counts the rows written, since counting answers would count retried rows twice."""
    columns = ["error", "stats", "token_ids", "prompt_tokens", "turns"]
    counts = Counts()
    try:
        rows = _read([output], is_parquet, columns)
    except FileNotFoundError:  # Ray removes a folder without rows
        return counts
    parts = rows.map_batches(_count_table, batch_format="pyarrow")
    for row in parts.iter_rows():
        values = json.loads(row["counts"])
        counts.add(Counts(**{**values, "stats": AcceptanceStats(**values["stats"])}))
    return counts


def _count_table(table: pa.Table) -> pa.Table:
    counts = Counts()
    for row in table.to_pylist():
        counts.add_record(json.loads(row["line"]) if "line" in row else row)
    return pa.table({"counts": [json.dumps(asdict(counts))]})


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in row.items() if value is not None}
    if isinstance(arguments := values.get("chat_template_kwargs"), dict):
        # A column of structs has every key in every row.
        values["chat_template_kwargs"] = {n: value for n, value in arguments.items() if value is not None}
    return values


def _row(place: str, values: Mapping[str, Any]) -> Row | RowError:
    try:
        return make_row(place, values, None)
    except (ValueError, RecursionError) as error:
        return RowError(place, error)


def _row_of_line(place: str, line: bytes, number: int | None) -> Row | RowError:
    try:
        return parse_line(place, line if len(line) <= MAX_LINE else None, number)
    except (ValueError, RecursionError) as error:
        return RowError(place, error)


def _is_parquet(inputs: Sequence[str]) -> bool:
    # A folder at a URL has to say it by its name.
    kinds = {path.rstrip("/").endswith(".parquet") or any(Path(path).rglob("*.parquet")) for path in inputs}
    if len(kinds) > 1:
        raise InputError("--input: Parquet and JSON lines cannot be mixed")
    return kinds == {True}


def _cause(error: Exception) -> str:
    """The last line of the first traceback, without what Ray says about retries after it."""
    first = re.split(r"\n\nThe above exception|\nFailed to .* attempts", str(error))[0]
    return first.strip().rpartition("\n")[2]
