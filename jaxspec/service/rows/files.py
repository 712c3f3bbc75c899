"""Reading rows from JSONL files, pipes and Parquet files."""

import errno
import io
import os
import re
from bisect import bisect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from jaxspec.installation import optional
from jaxspec.service.rows import row as rows
from jaxspec.service.rows.errors import InputError
from jaxspec.service.rows.ids import IdTable
from jaxspec.service.rows.openai_lines import RefusedLine
from jaxspec.service.rows.row import PLAIN, Form, Row, RowError, make_row, parse_line

STDIN = "-"
"""The name that stands for standard input."""


# OpenAI's requests sample unless they say otherwise.
_SAMPLING_WORDS = (b'"temperature"', b'"top_k"', b'"top_p"', b'"custom_id"')


def input_files(*sources: str) -> list[str]:
    """The sources with the files of a folder, in the order of their names, in place of each folder.

    Names in it that begin with "." or "_" are left out, as programs write such files beside others.

    Raises:
      InputError: a folder cannot be read or has no file.
    """
    return [file for source in sources for file in _files(source)]


def _files(source: str) -> list[str]:
    if _is_url(source):
        with _reading(source):
            files = _needs_pyarrow("urls").files_at(source)
    else:
        files = sorted(str(path) for path in Path(source).rglob("*") if path.is_file()) or [source]
    own = [file for file in files if not re.search(r"/[._]", file[len(source.rstrip("/")) :])]
    if not own:
        raise InputError(f"cannot read {source}: a folder without files")
    return own


def read_rows(*sources: str | Path, unique_ids: bool = True, form: Form = PLAIN) -> Iterator[Row | RowError]:
    """Yields the rows of JSONL or Parquet files while reading them; a bad row is yielded as its error.

    A row is an object with one of "prompt" (text or token ids), "messages" (a list of {"role", "content"})
    and "turns" (a list of user turns); and optionally

    - "id": text or a whole number;
    - any field of `SamplingParams`;
    - "n": the number of answers, for a row without turns;
    - "chat_template_kwargs", "continue_final_message", "special_tokens_as_text": as in `Engine.generate`;
    - "response", "completion" or "answer": its own answer, from which a head may learn;
    - "category", "source", "task", "metadata": notes, which are not looked at.

    Another key is an error, another column an error of the whole file. Blank lines and a byte order mark are
    ignored. Every source is read once, from beginning to end; only a hash of every id is kept.

    Args:
      sources: paths of files or pipes, or "-" for standard input; read in order as one input. Those that end
        in ".parquet" are Parquet.
      unique_ids: whether a second row with the same id is an error.
      form: how rows are read, where they have other keys.

    Raises:
      InputError: a source cannot be read; raised by the call itself if that is known without opening it.
    """
    for source in sources:
        _check_readable(source)
    return _read(sources, IdTable() if unique_ids else None, form)


def _read(sources: Sequence[str | Path], taken: IdTable | None, form: Form) -> Iterator[Row | RowError]:
    places = _Places()
    for source in sources:
        places.begin(source)
        if is_parquet(source):
            yield from _read_parquet(source, taken, form, places)
            continue
        with closing(_lines(source)) as lines:
            for line in lines:
                number = places.count()
                if line is not None and not line.strip():
                    continue
                yield _row(partial(parse_line, line=line), number, taken, form, places)


def _read_parquet(
    source: str | Path, taken: IdTable | None, form: Form, places: "_Places"
) -> Iterator[Row | RowError]:
    for values in _needs_pyarrow("parquet").read(source, form):
        yield _row(partial(make_row, values=values), places.count(), taken, form, places)


def _row(
    make: Callable[..., Row], number: int, taken: IdTable | None, form: Form, places: "_Places"
) -> Row | RowError:
    try:
        row = make(places.of(number), number=number, form=form)
        first = None if taken is None else taken.add(row.id, number)
        if first is not None:
            raise ValueError(f"id {row.id!r} is taken by {places.of(first)}")
    except RefusedLine as error:
        clash = None if taken is None else taken.add(error.custom_id, number)
        return RowError(places.of(number), error, record=error.record() if clash is None else None)
    except (ValueError, RecursionError) as error:
        return RowError(places.of(number), error)
    return row


def is_parquet(source: str | Path) -> bool:
    """Whether a source is a Parquet file, by its name."""
    name = str(source).partition("?")[0] if _is_url(source) else str(source)
    return name.lower().endswith(".parquet")


def parquet_columns(sources: Sequence[str | Path], form: Form, *, is_json: bool) -> Any:
    """The `pyarrow.Schema` of what output rows have of Parquet files: "id" and the columns that are kept.

    Args:
      form: how they are read.
      is_json: whether the output is JSON lines.

    Raises:
      InputError: the files have different columns, or one that rows, or JSON, cannot have; or pyarrow is not
        installed.
    """
    parquet = _needs_pyarrow("parquet")
    columns = parquet.output_columns(sources, form)
    if is_json:
        parquet.check_json(columns)
    return columns


def _needs_pyarrow(module: str) -> ModuleType:
    try:
        optional("pyarrow.parquet", extra="parquet")
    except ModuleNotFoundError as error:
        raise InputError(error) from None
    return import_module(f"jaxspec.service.rows.{module}")


def count_rows(*sources: str | Path) -> int | None:
    """The number of lines that are not blank; None if a source, such as a pipe, can be read only once.

    Raises:
      InputError: a source cannot be read.
    """
    if _is_read_once(sources):
        return None
    return sum(map(_count, sources))


def _count(source: str | Path) -> int:
    if is_parquet(source):
        return _needs_pyarrow("parquet").count(source)
    return sum(1 for line in _lines(source) if line is None or line.strip())


def may_sample(*sources: str | Path) -> bool:
    """Whether a row may set how it is sampled: a key occurs, or a source can be read only once.

    Raises:
      InputError: a source cannot be read.
    """
    if _is_read_once(sources):
        return True
    return any(map(_names_sampling, sources))


def _names_sampling(source: str | Path) -> bool:
    if is_parquet(source):
        return any(
            f'"{name}"'.encode() in _SAMPLING_WORDS for name in _needs_pyarrow("parquet").column_names(source)
        )
    return any(word in line for line in _lines(source) if line is not None for word in _SAMPLING_WORDS)


def _is_url(source: str | Path) -> bool:
    return "://" in str(source)


def _is_read_once(sources: Sequence[str | Path]) -> bool:
    # /dev/fd/3 may be a regular file that some systems continue to read at its current position.
    plain = (os.path.isfile(source) and not str(source).startswith("/dev/") for source in sources)
    return STDIN in sources or not all(plain)


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
        name = self._names[file]
        return f"{name} {'row' if is_parquet(name) else 'line'} {number - self._first[file] + 1}"


def _lines(source: str | Path) -> Generator[bytes | None, None, None]:
    """Lines of a file; None for a line longer than `MAX_LINE`."""
    with _reading(source), _open(source) as file:
        while line := file.readline(rows.MAX_LINE + 1):
            if len(line) <= rows.MAX_LINE:
                yield line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(rows.MAX_LINE)
            yield None


@contextmanager
def _reading(source: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read {_name(source)}: {error.strerror or error}") from None


def _check_readable(source: str | Path) -> None:
    """Checks a source without opening it, since a named pipe can be opened only once."""
    if source == STDIN or _is_url(source):
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
    if _is_url(source):
        return io.BufferedReader(_needs_pyarrow("urls").open_url(str(source)))
    return open(0, "rb", closefd=False) if source == STDIN else open(source, "rb")
