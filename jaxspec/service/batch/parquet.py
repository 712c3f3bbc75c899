"""Parquet files of answers, written row group by row group and finished as a whole."""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxspec.errors import one_line
from jaxspec.service.batch.columns import ANSWER_COLUMNS, as_columns
from jaxspec.service.batch.output import Output, OutputError
from jaxspec.service.batch.record import write_record

ROW_GROUP = 1024
"""Rows that are held until they are written."""


class ParquetFile(Output):
    """An output that appears when it is closed, and holds then what was answered.

    Until then it is beside it, as "OUT.parquet.part", locked against other runs. What a run that was killed
    had written is lost, since a Parquet file without its end cannot be read.
    """

    def __init__(self, path: Path, columns: pa.Schema):
        """Opens the file beside it.

        Args:
          path: a file that does not exist.
          columns: the types of "id" and of the keys that are kept.

        Raises:
          OutputError: it exists, cannot be written, or another run writes it.
        """
        self.path = path
        self.recorded = {}
        self._schema = pa.schema([*columns, *(pa.field(*each) for each in ANSWER_COLUMNS.items())])
        self._part = path.with_name(f"{path.name}.part")
        self._records: list[dict[str, Any]] = []
        if path.exists():
            raise OutputError(f"{path} exists: give another --output")
        try:
            self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise self._cannot_write(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise OutputError(f"{path}: another run is writing it") from None
        self._file.truncate(0)
        self._writer = pq.ParquetWriter(self._file, self._schema)

    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any], *, force: bool = False) -> None:
        try:
            write_record(self.path, {"settings": dict(settings), **about})
        except OSError as error:
            raise self._cannot_write(error) from None

    def append(self, record: Mapping[str, Any]) -> None:
        """As of `Output`; writes `ROW_GROUP` rows at a time."""
        self._records.append(as_columns(record))
        if len(self._records) >= ROW_GROUP:
            self._write()

    def close(self) -> None:
        """Writes the rest, finishes the file and gives it its name."""
        with self._file:
            if self._records:
                self._write()
            try:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._part, self.path)
            except (OSError, pa.ArrowException) as error:
                raise self._cannot_write(error) from None

    def _write(self) -> None:
        records, self._records = self._records, []
        try:
            self._writer.write_table(pa.Table.from_pylist(records, self._schema))
        except (OSError, pa.ArrowException) as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: Exception) -> OutputError:
        return OutputError(one_line(f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}"))
