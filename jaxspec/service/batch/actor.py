"""An engine that answers tables of rows, for pipelines of Ray Data."""

import os
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jaxspec.engine.api.load import load
from jaxspec.sampling import SamplingParams
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.columns import ANSWER_COLUMNS, as_columns
from jaxspec.service.batch.devices import thread_limits
from jaxspec.service.batch.run import BatchRun
from jaxspec.service.rows import KEYS, NOTES, Row, RowError, make_row
from jaxspec.service.rows.parquet import without_nulls


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
            (`jaxspec.service.rows.read_rows`). A null is a key that the row does not have.

        Returns:
          Columns "id", `ANSWER_COLUMNS` and "error", which is null in answered rows; one row for each row of
          `table`.
        """
        unknown = {name: True for name in table.column_names if name not in KEYS}
        # Of columns that are not looked at, Python may be unable to hold the values.
        asked = table.select([name for name in KEYS if name in table.column_names and name not in NOTES])
        given = [without_nulls(row) for row in asked.to_pylist()]
        rows = [_row(f"row {row.get('id')!r}", {**row, **unknown}) for row in given]
        run = BatchRun(self._engine, rows, self._params, raw=self._raw, keep_order=True)
        records = [
            {
                **(as_columns(ended.to_dict()) if isinstance(ended, Answer) else {"error": str(ended)}),
                "id": row_id,
            }
            for row_id, ended in zip([row.get("id") for row in given], run, strict=True)
        ]
        id_type = table.schema.field("id").type if "id" in table.column_names else pa.null()
        columns = {"id": id_type, **ANSWER_COLUMNS, "error": pa.string()}
        return pa.Table.from_pylist(records, pa.schema(columns))


def _row(place: str, values: Mapping[str, Any]) -> Row | RowError:
    try:
        return make_row(place, values, None)
    except (ValueError, RecursionError) as error:
        return RowError(place, error)
