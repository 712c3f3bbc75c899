"""The output file: one row per line, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from jaxspec.batch.rows import RowId


class OutputError(ValueError):
    """An output file that cannot be used; the message names it."""


class OutputFile:
    """Appends rows, each in one unbuffered write, so that what was finished survives whatever comes.

    Attributes:
      finished: ids of the rows it held when it was opened.
    """

    def __init__(self, path: Path, *, resume: bool):
        """Opens the file.

        Args:
          resume: go on with what it holds; a last line that was cut off is removed, its row to be done
            again. Without it the file must be new or empty.

        Raises:
          OutputError: it cannot be written, holds something already, or (resuming) holds something else.
        """
        self.path = path
        self.finished: set[RowId] = set()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from None
        try:
            if os.fstat(self._file.fileno()).st_size:
                if not resume:
                    raise OutputError(f"{path} exists: give --resume to go on with it, or another --output")
                self._read_finished()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes one row.

        Raises:
          OutputError: it cannot be written (a full disk).
        """
        line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        self._file.close()

    def _read_finished(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self.finished.add(self._row_id(number, line))
                whole += len(line)
        self._file.truncate(whole)

    def _row_id(self, number: int, line: bytes) -> RowId:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        is_row = isinstance(record, dict) and "token_ids" in record
        if not is_row or not isinstance(record.get("id"), str | int):
            raise OutputError(f"{self.path} line {number} is no output row: cannot resume from this file")
        return record["id"]


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror}")
