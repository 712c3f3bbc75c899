"""Rows of the input file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.chat_template import check_messages

RowId = str | int


class RowError(ValueError):
    """A row that cannot be answered; the message begins with its line."""

    def __init__(self, line: int, problem: object):
        super().__init__(f"line {line}: {problem}")


@dataclass(frozen=True)
class Row:
    """One conversation to answer.

    Attributes:
      number: its line in the file, counted from 0.
      id: the row's own, or `number`.
      prompt: what the first request reads: text, token ids or messages; None where there are turns.
      turns: the user's turns, each answered before the next is asked.
    """

    number: int
    id: RowId
    prompt: str | list[int] | list[dict[str, str]] | None
    turns: tuple[str, ...] = ()

    @property
    def line(self) -> int:
        """Its line, counted from 1 as editors do."""
        return self.number + 1


def read_rows(path: Path) -> Iterator[Row | RowError]:
    """Rows of a JSONL file as they are read; a bad one comes as its error, and the rest still follow.

    A row is an object with one of "prompt" (text or token ids), "messages" (a list of {"role",
    "content"}) and "turns" (a list of user turns), and perhaps "id" (text or a whole number, no two the
    same). Other keys are let be, blank lines are passed over.

    Raises:
      OSError: the file cannot be read.
    """
    lines: dict[RowId, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = _parse(number, line)
                if row.id in lines:
                    raise ValueError(f"id {row.id!r} is taken by line {lines[row.id]}")
            except (ValueError, RecursionError) as error:
                yield RowError(number + 1, error)
            else:
                lines[row.id] = row.line
                yield row


def _parse(number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON: {problem} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise ValueError(f"must be an object, got {type(values).__name__}")
    kinds = [kind for kind in ("prompt", "messages", "turns") if kind in values]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise ValueError(f"must have one of prompt, messages and turns, got {found}")
    row_id = _check_id(values.get("id", number))
    if kinds == ["turns"]:
        return Row(number, row_id, None, _check_turns(values["turns"]))
    if kinds == ["messages"]:
        check_messages(values["messages"])
        return Row(number, row_id, values["messages"])
    return Row(number, row_id, _check_prompt(values["prompt"]))


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
