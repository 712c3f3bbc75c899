"""Reading and checking the rows of the input."""

import errno
import json
import os
from bisect import bisect
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec.batch.ids import IdTable, RowId, hash_json
from jaxspec.checkpoints.chat_template import check_messages
from jaxspec.engine import Generation

STDIN = "-"
"""The name that stands for standard input."""

MAX_LINE = 16 * 2**20
"""The longest line that is accepted, in bytes."""


class InputError(ValueError):
    """The input cannot be read; the message names it."""


class RowError(ValueError):
    """A row without an answer; the message is one line and begins with the row's place.

    Attributes:
      place: as `Row.place`.
      generations: what was generated nevertheless: answers to earlier turns, and a failed generation.
    """

    def __init__(self, place: str, problem: object, generations: Sequence[Generation] = ()):
        text = " ".join(str(problem).splitlines())
        text = text if len(text) <= 300 else text[:300] + "…"
        super().__init__(place, text, generations)  # the arguments, so that it can be pickled
        self.place = place
        self.generations = generations
        self._text = text

    def __str__(self) -> str:
        return f"{self.place}: {self._text}"


@dataclass(frozen=True)
class Row:
    """One conversation to answer.

    Attributes:
      place: file and line, for messages: "in.jsonl line 3".
      id: given in the row, or else the number of its line, counted from 0 over all files.
      prompt: text, token ids or messages; None for a row with turns.
      turns: the user's turns, each answered before the next is asked.
    """

    place: str
    id: RowId
    prompt: str | list[int] | list[dict[str, Any]] | None
    turns: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """A hash of prompt and turns, without the id: 16 hexadecimal digits."""
        return hash_json([self.prompt, self.turns], 8).hex()


def read_rows(*sources: str | Path) -> Iterator[Row | RowError]:
    """Yields the rows of JSONL files while reading them; a bad row is yielded as its error.

    A row is an object with one of "prompt" (text or token ids), "messages" (a list of {"role",
    "content"}) and "turns" (a list of user turns), and optionally a unique "id" (text or a whole number).
    Other keys and blank lines are ignored. Every source is read once, from beginning to end; only a hash of
    every id is kept.

    Args:
      sources: paths of files or pipes, or "-" for standard input; read in order as one input.

    Raises:
      InputError: a source cannot be read; raised by the call itself if that is known without opening it.
    """
    for source in sources:
        _check_readable(source)
    return _read(sources)


def _read(sources: Sequence[str | Path]) -> Iterator[Row | RowError]:
    places = _Places()
    taken = IdTable()
    for source in sources:
        places.begin(source)
        with closing(_lines(source)) as lines:
            for line in lines:
                number = places.count()
                if line is not None and not line.strip():
                    continue
                try:
                    row = parse_line(places.of(number), line, number)
                    first = taken.add(row.id, number)
                    if first is not None:
                        raise ValueError(f"id {row.id!r} is taken by {places.of(first)}")
                except (ValueError, RecursionError) as error:
                    yield RowError(places.of(number), error)
                else:
                    yield row


def count_rows(*sources: str | Path) -> int | None:
    """The number of lines that are not blank; None if a source, such as a pipe, can be read only once.

    Raises:
      InputError: a source cannot be read.
    """
    # /dev/fd/3 may be a regular file that some systems continue to read at its current position.
    plain = (os.path.isfile(source) and not str(source).startswith("/dev/") for source in sources)
    if STDIN in sources or not all(plain):
        return None
    return sum(1 for source in sources for line in _lines(source) if line is None or line.strip())


class _Places:
    """Maps line numbers of the whole input to files and their lines."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first: list[int] = []
        self._lines = 0

    def begin(self, source: str | Path) -> None:
        self._names.append(_name(source))
        self._first.append(self._lines)

    def count(self) -> int:
        """Counts one more line; returns its number, from 0."""
        self._lines += 1
        return self._lines - 1

    def of(self, number: int) -> str:
        file = bisect(self._first, number) - 1
        return f"{self._names[file]} line {number - self._first[file] + 1}"


def _lines(source: str | Path) -> Generator[bytes | None, None, None]:
    """Lines of a file; None for a line longer than `MAX_LINE`."""
    try:
        with _open(source) as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) <= MAX_LINE:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
                yield None
    except OSError as error:
        raise InputError(f"cannot read {_name(source)}: {error.strerror}") from None


def _check_readable(source: str | Path) -> None:
    """Checks a source without opening it, since a named pipe can be opened only once."""
    if source == STDIN:
        return
    if not os.path.exists(source):
        problem = errno.ENOENT
    elif os.path.isdir(source):
        problem = errno.EISDIR
    elif not os.access(source, os.R_OK):
        problem = errno.EACCES
    else:
        return
    raise InputError(f"cannot read {source}: {os.strerror(problem)}")


def _name(source: str | Path) -> str:
    return "stdin" if source == STDIN else str(source)


def _open(source: str | Path) -> BinaryIO:
    return open(0, "rb", closefd=False) if source == STDIN else open(source, "rb")


def parse_line(place: str, line: bytes | None, number: int | None) -> Row:
    """The row in a line of JSON.

    Args:
      place: as `Row.place`.
      line: None for a line longer than `MAX_LINE`.
      number: the id of a row without one; None if an id is required.

    Raises:
      ValueError, RecursionError: the line is not a valid row.
    """
    if line is None:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    try:
        values = json.loads(line.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON: {problem} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise ValueError(f"must be an object, got {type(values).__name__}")
    row = make_row(place, values, number)
    asked = row.turns if row.prompt is None else row.prompt
    if b"\\u" in line and not _is_unicode(json.dumps(asked, ensure_ascii=False)):
        (kind,) = _kinds(values)
        raise ValueError(f"{kind} is not valid Unicode")
    _ = row.digest  # raises RecursionError if the row is nested too deeply
    return row


def make_row(place: str, values: Mapping[str, Any], number: int | None) -> Row:
    """The row with these keys and values; other arguments and errors as in `parse_line`."""
    kinds = _kinds(values)
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise ValueError(f"must have one of prompt, messages and turns, got {found}")
    if number is None and "id" not in values:
        raise ValueError("must have an id")
    row_id = _check_id(values.get("id", number))
    (kind,) = kinds
    value = values[kind]
    if kind == "turns":
        return Row(place, row_id, None, _check_turns(value))
    if kind == "messages":
        check_messages(value)
        return Row(place, row_id, value)
    return Row(place, row_id, _check_prompt(value))


def _kinds(values: Mapping[str, Any]) -> list[str]:
    return [kind for kind in ("prompt", "messages", "turns") if kind in values]


def _check_id(value: Any) -> RowId:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"id must be text or a whole number, got {value!r}")
    if isinstance(value, str) and not _is_unicode(value):
        raise ValueError(f"id is not valid Unicode: {value!r}")
    return value


def _check_prompt(value: Any) -> str | list[int]:
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not (isinstance(value, str) or is_ids):
        raise ValueError("prompt must be text or a list of token ids")
    if not value:
        raise ValueError("prompt is empty")
    return value


def _check_turns(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and value and all(isinstance(turn, str) and turn for turn in value)):
        raise ValueError("turns must be a list of texts, none of them empty")
    return tuple(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
