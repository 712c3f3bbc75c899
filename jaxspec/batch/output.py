"""The output file: one row per line, whole or not at all, of one run, and one process at a time."""

import fcntl
import json
import os
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.batch.ids import IdTable
from jaxspec.batch.record import describe_difference, read_record, record_path, write_record
from jaxspec.batch.rows import Row, RowError

SYNC_SECONDS = 5.0
"""How many seconds of answers a machine that fails may cost; a process that is killed costs none."""


_ROW_BEGINS = b'{"id": '


class OutputError(ValueError):
    """An output that cannot be used; the message names it."""


class OutputFile:
    """Appends rows, each in one unbuffered write, so that what was finished survives the process.

    A lock on the file itself keeps other processes away; the system lets go of it when this one ends,
    however it ends. A pipe or a device is neither locked nor recorded.

    Attributes:
      recorded: the settings that its rows were begun with; empty where none are recorded.
    """

    def __init__(self, path: Path, *, resume: bool):
        """Opens the file and changes nothing in it; `begin` comes next.

        Args:
          resume: go on with what it holds. Without it the file must be new or empty.

        Raises:
          OutputError: it cannot be written, another process writes it, it holds something already, or
            (resuming) something else.
        """
        self.path = path
        self.recorded: dict[str, Any] = {}
        # For every id a digest of what was asked.
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
                raise OutputError(f"{path} is no plain file: there is nothing to resume")
            if resume:
                self._read_finished()
                self.recorded = read_record(path).get("settings", {})
            elif self._is_plain and os.fstat(self._file.fileno()).st_size:
                raise OutputError(f"{path} exists: give --resume to go on with it, or another --output")
        except BaseException:
            self._file.close()
            raise

    @property
    def num_finished(self) -> int:
        """Rows that it held when it was opened."""
        return len(self._finished)

    def holds(self, row: Row) -> bool:
        """Whether the row's id was answered when the file was opened."""
        return self._finished.get(row.id) is not None

    def answers(self, row: Row) -> bool:
        """Whether it was answered then for what the row asks now."""
        return self._finished.get(row.id) == int(row.digest, 16)

    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any], *, force: bool = False) -> None:
        """Records what the run is begun with, and removes a last line that was cut off.

        Args:
          settings: what answers depend on, by name; JSON values. Those of the rows that the file holds must
            be the same.
          about: what else is worth knowing later.
          force: go on with other settings all the same; the record then keeps both.

        Raises:
          OutputError: the settings differ, or something cannot be written.
        """
        if not self._is_plain:
            return
        settings = json.loads(json.dumps(settings, default=str))  # of TOML's dates
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
        """Writes one row, and every `SYNC_SECONDS` forces all to the disk.

        Raises:
          OutputError: it cannot be written (a full disk).
        """
        line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def close(self) -> None:
        """Forces what was written to the disk, and lets other processes have the file.

        Raises:
          OutputError: the disk has failed.
        """
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
                f"{self.path} cannot be locked ({error.strerror}): see that no other run writes it",
                stacklevel=3,
            )

    def _difference(self, settings: Mapping[str, Any]) -> str:
        if not self.recorded:
            known = f"{record_path(self.path).name} does not say what it was begun with"
        else:
            known = f"it was begun with {describe_difference(self.recorded, settings)}"
        return f"{known}; --resume=force goes on all the same"

    def _read_finished(self) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    # A machine that failed may have left zeros.
                    begun = line.rstrip(b"\0")[: len(_ROW_BEGINS)]
                    if not _ROW_BEGINS.startswith(begun):
                        raise self._no_row(number)
                    return
                self._add(number, line)
                self._whole += len(line)

    def _add(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            row_id, digest = record["id"], int(record.get("input_digest", "0"), 16)
            is_row = "token_ids" in record and isinstance(row_id, str | int) and 0 <= digest < 2**64
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_row = False
        if not is_row:
            raise self._no_row(number)
        if self._finished.add(row_id, digest) is not None:
            raise OutputError(f"cannot resume {self.path}: line {number} is the second with id {row_id!r}")

    def _no_row(self, number: int) -> OutputError:
        return OutputError(f"{self.path} line {number} is no output row: cannot resume from this file")


class Unanswered:
    """Rows that an output does not answer yet, as they are read; they can be iterated over once.

    Attributes:
      num_rows: read so far, malformed ones too.
      num_skipped: those of them that the output answers.
    """

    def __init__(self, rows: Iterable[Row | RowError], output: OutputFile, *, force: bool = False):
        """Prepares it.

        Args:
          force: skip a row even where its id was answered for other content.
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
            if isinstance(row, RowError) or not self._output.holds(row):
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
