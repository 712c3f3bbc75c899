"""Batch runs on a Ray cluster: Ray Data reads, distributes, retries and writes rows.

Only the engine that answers batches is ours, and a reader and a writer of raw lines: of Ray's two readers of
JSON lines, one parses texts as dates and the other splits lines inside texts.
"""

import io
import json
import pickle
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jaxspec.installation import needs

with needs("ray"):
    import pyarrow as pa
    import ray
    import ray.data
    from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource

from jaxspec.engine import AcceptanceStats, EngineError
from jaxspec.errors import one_line
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.actor import Answerer, LineAnswerer
from jaxspec.service.batch.cluster import Share, connect, share_cluster
from jaxspec.service.batch.output import OutputError
from jaxspec.service.batch.summary import Summary
from jaxspec.service.rows import KEYS, InputError
from jaxspec.spelling import known_names

__all__ = [
    "Answerer",
    "LineAnswerer",
    "LineSink",
    "LineSource",
    "Share",
    "answer_files",
    "connect",
    "share_cluster",
]

_BATCHES_AT_ONCE = 2
_LINES_AT_ONCE = 1024


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


def answer_files(
    inputs: Sequence[str],
    output: str,
    *,
    params: SamplingParams,
    share: Share,
    slots: int,
    keep_order: bool = False,
    limit: int | None = None,
    **answerer: Any,
) -> Summary:
    """Answers the rows of files; writes a folder of files of the same format.

    Args:
      inputs: files or folders, either all Parquet (".parquet") or all JSON lines.
      output: a folder that does not exist yet.
      params: as in `Answerer`.
      share: from `share_cluster`.
      slots: rows that an engine answers at once.
      keep_order: write rows in the order of the input.
      limit: answer only so many rows.
      **answerer: other arguments of `Answerer`.

    Returns:
      A summary, whose time includes loading.

    Raises:
      InputError: inputs of both formats, that cannot be read, or with a column that rows cannot have.
      OutputError: the folder cannot be made, or has the name of the other format.
      EngineError: Ray failed.
    """
    start = time.perf_counter()
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
        raise InputError(
            f"{', '.join(inputs)}: unknown column {unknown[0]!r}; {known_names(unknown[0], KEYS)}"
        )
    # Small batches, because a batch is repeated if its actor is lost.
    batch_size = 2 * slots
    try:
        if limit is not None:
            rows = rows.limit(limit)
        answers = rows.repartition(target_num_rows_per_block=batch_size).map_batches(
            Answerer if is_parquet else LineAnswerer,
            fn_constructor_kwargs={**answerer, "params": params, "cores": share.cores},
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
        total = Summary.total(_summaries(output, is_parquet))
    except ray.exceptions.RayError as error:
        raise EngineError(one_line(f"Ray: {_cause(error)}")) from None
    except OSError as error:
        raise OutputError(one_line(f"cannot write {output}: {error}")) from None
    return replace(total, seed=params.seed, seconds=time.perf_counter() - start)


def _read(paths: Sequence[str], is_parquet: bool, columns: list[str] | None = None) -> ray.data.Dataset:
    if is_parquet:
        return ray.data.read_parquet(list(paths), columns=columns)
    return ray.data.read_datasource(LineSource(paths))


def _summaries(output: str, is_parquet: bool) -> Iterator[Summary]:
    """Of the rows that were written, since counting answers would count retried rows twice."""
    columns = ["error", "stats", "token_ids", "prompt_tokens", "turns", "samples"]
    try:
        rows = _read([output], is_parquet, columns)
    except FileNotFoundError:  # Ray removes a folder without rows
        return
    for row in rows.map_batches(_summarise, batch_format="pyarrow").iter_rows():
        yield pickle.loads(row["summary"])


def _summarise(table: pa.Table) -> pa.Table:
    records = [json.loads(row["line"]) if "line" in row else row for row in table.to_pylist()]
    answered = [record for record in records if record.get("error") is None]
    every = [each for one in answered for each in one.get("turns") or one.get("samples") or [one]]
    summary = Summary(
        rows=len(records),
        answered=len(answered),
        failures=tuple(record["error"] for record in records if record.get("error") is not None),
        prompt_tokens=sum(each["prompt_tokens"] for each in every),
        tokens=sum(len(each["token_ids"]) for each in every),
        stats=AcceptanceStats.total(AcceptanceStats.from_dict(record["stats"]) for record in answered),
    )
    return pa.table({"summary": [pickle.dumps(summary)]})


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
