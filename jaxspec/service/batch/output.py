"""The output file: one complete row per line, written by one run and one process at a time."""

import fcntl
import json
import os
import stat
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.service.batch.record import describe_difference, read_record, record_path, write_record
from jaxspec.service.rows import IdTable, Row, RowError, RowId

SYNC_SECONDS = 5.0
"""Answers of so many seconds may be lost if the machine fails; none are lost if the process is killed."""


_ROW_BEGINS = b'{"id": '


class OutputError(ValueError):
    """The output cannot be used; the message names it."""


class Output(ABC):
    """What a run writes its rows to; one that is not resumed holds none.

    Attributes:
      path: the file.
      recorded: the settings of the run that wrote the existing rows; empty if none are recorded.
    """

    path: Path
    recorded: dict[str, Any]

    def holds(self, row_id: RowId) -> bool:
        """Whether there was a row with this id when it was opened."""
        return False

    def answers(self, row: Row) -> bool:
        """Whether there was an answer to this very row when it was opened."""
        return False

    @abstractmethod
    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any], *, force: bool = False) -> None:
        """Records the run's settings.

        Args:
          settings: everything that answers depend on, as JSON values by name. If there are rows, they must
            have been written with the same settings.
          about: further information for the record.
          force: continue although the settings differ; the record then keeps both.

        Raises:
          OutputError: the settings differ, or something cannot be written.
        """

    @abstractmethod
    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a row.

        Raises:
          OutputError: it cannot be written, for example because the disk is full.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes the file; errors as of `append`."""


class OutputFile(Output):
    """Appends rows, each in one unbuffered write, so that finished rows survive the process.

    The file is locked against other processes; the system releases the lock when this process ends, however
    it ends. A pipe or a device has neither a lock nor a record.
    """

    def __init__(self, path: Path, *, resume: bool):
        """Opens the file without changing it; call `begin` next.

        Args:
          path: the file.
          resume: continue the existing rows. Otherwise the file must be new or empty.

        Raises:
          OutputError: the file cannot be written, another process is writing it, it is not empty, or (with
            `resume`) its content is not output rows.
        """
        self.path = path
        self.recorded = {}
        # A digest of the question, for every id.
        self._finished = IdTable()
        self._whole = 0
        self._synced = time.monotonic()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from None
        try:
            status = os.fstat(self._file.fileno())
            self._is_plain = stat.S_ISREG(status.st_mode)
            if self._is_plain:
                self._lock()
            elif resume:
                raise OutputError(f"{path} is not a regular file: there is nothing to resume")
            if resume:
                self._read_finished()
                self.recorded = read_record(path).get("settings", {})
            elif self._is_plain and os.fstat(self._file.fileno()).st_size:
                raise OutputError(f"{path} exists: give --resume to continue it, or another --output")
        except BaseException:
            self._file.close()
            raise

    @property
    def num_finished(self) -> int:
        """The number of rows that the file held when it was opened."""
        return len(self._finished)

    def holds(self, row_id: RowId) -> bool:
        return self._finished.get(row_id) is not None

    def answers(self, row: Row) -> bool:
        return self._finished.get(row.id) == int(row.digest, 16)

    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any], *, force: bool = False) -> None:
        """As of `Output`; also removes an incomplete last line."""
        if not self._is_plain:
            return
        settings = json.loads(json.dumps(settings, default=str))  # str: TOML has dates
        record: dict[str, Any] = {"settings": settings, **about}
        is_new = not os.fstat(self._file.fileno()).st_size
        if not is_new and self.recorded != settings:
            if not force:
                raise OutputError(f"cannot resume {self.path}: {self._difference(settings)}")
            record["before"] = read_record(self.path)
        try:
            if is_new or self.recorded != settings:
                write_record(self.path, record)
            self._file.truncate(self._whole)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def append(self, record: Mapping[str, Any]) -> None:
        """As of `Output`; syncs the file to disk every `SYNC_SECONDS`."""
        line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        """Syncs the file to disk, closes it and releases the lock."""
        try:
            with self._file:
                self._sync()
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def _sync(self) -> None:
        if self._is_plain:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{self.path}: another run is writing it") from None
        except OSError as error:
            warnings.warn(
                f"{self.path} cannot be locked ({error.strerror}): make sure that no other run writes it",
                stacklevel=3,
            )

    def _difference(self, settings: Mapping[str, Any]) -> str:
        if not self.recorded:
            known = f"{record_path(self.path).name} does not say what it was begun with"
        else:
            known = f"it was begun with {describe_difference(self.recorded, settings)}"
        return f"{known}; --resume=force continues anyway"

    def _read_finished(self) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    # A crash of the machine may leave zeros.
                    begun = line.rstrip(b"\0")[: len(_ROW_BEGINS)]
                    if not _ROW_BEGINS.startswith(begun):
                        raise self._no_row(number)
                    return
                self._add(number, line)
                self._whole += len(line)

    def _add(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            is_openais = "custom_id" in record and "response" in record
            row_id = record["custom_id" if is_openais else "id"]
            digest = int(record.get("input_digest", "0"), 16)
            is_row = is_openais or "token_ids" in record
            is_row = is_row and isinstance(row_id, str | int) and 0 <= digest < 2**64
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_row = False
        if not is_row:
            raise self._no_row(number)
        if self._finished.add(row_id, digest) is not None:
            raise OutputError(f"cannot resume {self.path}: line {number} is the second with id {row_id!r}")

    def _no_row(self, number: int) -> OutputError:
        return OutputError(f"{self.path} line {number} is no output row: cannot resume from this file")


class Unanswered:
    """Iterates once over the rows that an output does not answer yet.

    Attributes:
      num_rows: rows read so far, including malformed ones.
      num_skipped: rows among them that the output already answers.
    """

    def __init__(self, rows: Iterable[Row | RowError], output: Output, *, force: bool = False):
        """Prepares the iteration.

        Args:
          rows: all rows of the input.
          output: the output to compare with.
          force: skip a row whose id was answered, even if its content has changed since.
        """
        self._rows = rows
        self._output = output
        self._force = force
        self.num_rows = 0
        self.num_skipped = 0

    def __iter__(self) -> Iterator[Row | RowError]:
        """Yields rows and errors in the order of the input.

        Raises:
          OutputError: a row has changed since it was answered.
        """
        for row in self._rows:
            self.num_rows += 1
            if isinstance(row, RowError):
                if row.record is not None and self._output.holds(row.record["custom_id"]):
                    self.num_skipped += 1
                else:
                    yield row
                continue
            if not self._output.holds(row.id):
                yield row
                continue
            if not (self._force or self._output.answers(row)):
                raise OutputError(
                    f"cannot resume {self._output.path}: {row.place} is not what was answered as {row.id!r}; "
                    f"--resume=force keeps that answer"
                )
            self.num_skipped += 1


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror}")
