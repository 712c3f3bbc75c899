"""One row of a file of prompts: what it may hold, and its checks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from jaxspec.documents import whole_number
from jaxspec.engine import Generation
from jaxspec.engine.api.samples import check_count
from jaxspec.files.text.chat_template import check_arguments
from jaxspec.files.text.messages import as_messages
from jaxspec.sampling import SamplingParams
from jaxspec.service.openai import DEFAULTS, Asked
from jaxspec.service.rows.ids import RowId, hash_json
from jaxspec.service.rows.openai_lines import KEYS as KEYS_OF_LINES
from jaxspec.service.rows.openai_lines import read_line, row_values
from jaxspec.spelling import known_names

MAX_LINE = 16 * 2**20
"""The longest line that is accepted, in bytes."""

QUESTIONS = ("prompt", "messages", "turns")
ANSWERS = ("response", "completion", "answer")
SAMPLING = tuple(each.name for each in fields(SamplingParams))
FLAGS = ("continue_final_message", "special_tokens_as_text")
"""Arguments of `Engine.generate` that are true or false."""
NOTES = ("category", "source", "task", "metadata")
"""Keys that say something about a row and ask for nothing; their values are not looked at."""

ASKED = ("chat_template_kwargs", *FLAGS, "n", *SAMPLING)
"""Keys that ask for something beside the question."""
MAPPINGS = ("chat_template_kwargs", "logit_bias")
"""Those of them with keys of their own, which may be null, too."""
KEYS = ("id", *QUESTIONS, *ANSWERS, *ASKED, *NOTES)
"""Every key that a row may have."""
OUTPUT = (
    "id",
    "input_digest",
    "text",
    "token_ids",
    "prompt_tokens",
    "finish_reason",
    "seed",
    "stats",
    "logprobs",
    "top_logprobs",
    "turns",
    "samples",
    "error",
)
"""The keys of an output row, which no column of the input may have beside it."""


@dataclass(frozen=True)
class Form:
    """How the rows of a file are read.

    Attributes:
      prompt_key: the key of the question (a text, token ids or messages), in place of the usual ones.
      kept: keys that the output row has, too, whatever they say here; they may be others than `KEYS`. True
        takes all that ask for nothing.
      defaults: keys with values, for rows that do not have them; "chat_template_kwargs" key by key, "n" not
        for rows with turns.
      openai: whether a row may be a line of OpenAI's batch files.
      hosted: sampling parameters of such a line that does not set them.
    """

    prompt_key: str | None = None
    kept: Sequence[str] | bool = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    openai: bool = False
    hosted: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)

    @property
    def questions(self) -> tuple[str, ...]:
        """The keys of which one holds the question."""
        return QUESTIONS if self.prompt_key is None else (self.prompt_key,)

    @property
    def known(self) -> tuple[str, ...]:
        """Every key that a row may have, beside those that are kept."""
        return ("id", *self.questions, *ANSWERS, *ASKED, *NOTES)

    def keeps(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a row that its output row has.

        Raises:
          ValueError: an output row has another key of this name.
        """
        asking = {*self.questions, "id", *ASKED}
        kept = self.kept if not isinstance(self.kept, bool) else [k for k in values if k not in asking]
        found = {key: values[key] for key in kept if key in values} if self.kept else {}
        if clash := [key for key in found if key in OUTPUT]:
            raise ValueError(f"{clash[0]!r} cannot be kept: it is a key of the output")
        return found


PLAIN = Form()


class RowError(ValueError):
    """A row without an answer; the message is one line and begins with the row's place.

    Attributes:
      place: as `Row.place`.
      generations: what was generated nevertheless: answers to earlier turns, and a failed generation.
      record: the output row of a line of OpenAI's batch files that is answered with an error.
    """

    def __init__(
        self,
        place: str,
        problem: object,
        generations: Sequence[Generation] = (),
        record: Mapping[str, Any] | None = None,
    ):
        text = " ".join(str(problem).splitlines())
        text = text if len(text) <= 800 else text[:800] + "…"
        super().__init__(place, text, generations, record)  # the arguments, so that it can be pickled
        self.place = place
        self.generations = generations
        self.record = record
        self._text = text

    def __str__(self) -> str:
        return f"{self.place}: {self._text}"


@dataclass(frozen=True)
class Row:
    """One conversation to answer, or with its answer.

    Attributes:
      place: file and line, for messages: "in.jsonl line 3".
      id: given in the row, or else the number of its line, counted from 0 over all files.
      prompt: text, token ids, or messages as `as_messages` gives them; None for a row with turns.
      turns: the user's turns, each answered before the next is asked.
      sampling: the fields of `SamplingParams` that the row sets itself, none of them to null.
      chat_template_kwargs: arguments of the chat template.
      continue_final_message, special_tokens_as_text: as in `Engine.generate`.
      n: how many answers are wanted; None is one, which is not in a list.
      kept: keys of the row that its output row has, too.
      asked: the request, if the row is a line of OpenAI's batch files; it is answered in their form.
      answer: the row's own answer, to the prompt or to the last turn, from which a head may learn; None if it
        has none.
    """

    place: str
    id: RowId
    prompt: str | list[int] | list[dict[str, Any]] | None
    turns: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None
    n: int | None = None
    continue_final_message: bool = False
    special_tokens_as_text: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    asked: Asked | None = None

    @property
    def flags(self) -> dict[str, bool]:
        """Those of `FLAGS` that are true."""
        return {name: True for name in FLAGS if getattr(self, name)}

    @cached_property
    def digest(self) -> str:
        """A hash of what is asked, without the id and the answer: 16 hexadecimal digits."""
        asked: list[Any] = [self.prompt, self.turns]
        if self.sampling or self.chat_template_kwargs:
            asked += [dict(self.sampling), dict(self.chat_template_kwargs)]
        if self.n is not None:
            asked.append({"n": self.n})
        if self.flags:
            asked.append(self.flags)
        if self.asked is not None:
            asked.append(self.asked.endpoint)
        return hash_json(asked, 8).hex()

    @property
    def first_prompt(self) -> str | list[int] | list[dict[str, Any]]:
        """The prompt or the first turn, for a program that chooses all else itself.

        Raises:
          RowError: the row asks for more.
        """
        own = [*self.sampling, *(["chat_template_kwargs"] if self.chat_template_kwargs else []), *self.flags]
        own += ["n"] if self.n is not None else []
        if own:
            raise RowError(self.place, f"{own[0]}: this program does not take it from a row")
        return self.turns[0] if self.prompt is None else self.prompt


def parse_line(place: str, line: bytes | None, number: int | None, form: Form = PLAIN) -> Row:
    """The row in a line of JSON.

    Args:
      place: as `Row.place`.
      line: None for a line longer than `MAX_LINE`.
      number: the id of a row without one; None if an id is required.
      form: how it is read.

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
    row = make_row(place, values, number, form)
    if b"\\u" in line and row.asked is None:
        for key in values:
            is_read = key not in NOTES or key in row.kept
            if is_read and not _is_unicode(json.dumps([key, values[key]], ensure_ascii=False)):
                raise ValueError(f"{key} is not valid Unicode")
    _ = row.digest  # raises RecursionError if the row is nested too deeply
    return row


def make_row(place: str, values: Mapping[str, Any], number: int | None, form: Form = PLAIN) -> Row:
    """The row with these keys and values; other arguments and errors as in `parse_line`."""
    said = {key: _without_nulls(value) if key in MAPPINGS else value for key, value in values.items()}
    said = {key: value for key, value in said.items() if value is not None}
    others = KEYS_OF_LINES if form.openai else ()
    if "custom_id" in said and others:
        line = {key: value for key, value in values.items() if key in said or key not in form.known}
        custom_id, asked = read_line(line, form.defaults.get("n", 1))
        return Row(place, custom_id, asked=asked, **row_values(asked, form.defaults, form.hosted))
    question = _one_of(form.questions, said)
    kept = form.keeps(values)
    unknown = [
        key for key in values if not (key in form.known or key in kept or (key in others and key not in said))
    ]
    if unknown:
        raise ValueError(f"unknown key {unknown[0][:40]!r}; {known_names(unknown[0], form.known)}")
    if question is None:
        wanted = "one of prompt, messages and turns" if form.prompt_key is None else repr(form.prompt_key)
        raise ValueError(f"must have {wanted}, got none")
    if number is None and "id" not in said:
        raise ValueError("must have an id")
    row_id = _check_id(said.get("id", number))
    own = check_arguments(said.get("chat_template_kwargs"))
    arguments = {**form.defaults.get("chat_template_kwargs", {}), **own}
    values = {**form.defaults, **said}
    sampling = {name: values[name] for name in SAMPLING if name in values}
    if sampling:
        SamplingParams(**sampling)  # raises a ValueError that names the field
    value = values[question]
    turns = _check_turns(value) if question == "turns" else ()
    prompt: Any = None
    if question == "messages" or (form.prompt_key is not None and _holds_messages(value)):
        prompt = as_messages(value)
    elif not turns:
        prompt = _check_prompt(question, value)
    if turns and "n" in said:
        raise ValueError("n: a row with turns has one answer to each")
    n = None if turns or "n" not in values else check_count("n", values["n"])
    flags: dict[str, Any] = {name: _check_flag(name, values.get(name)) for name in FLAGS}
    return Row(place, row_id, prompt, turns, sampling, arguments, _answer(said), n, kept=kept, **flags)


def _without_nulls(value: Any) -> Any:
    """A mapping without the keys that say nothing."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _one_of(keys: Sequence[str], values: Mapping[str, Any]) -> str | None:
    """The one of these keys that is there, if one is."""
    found = [key for key in keys if key in values]
    if len(found) > 1:
        wanted = f"{', '.join(keys[:-1])} and {keys[-1]}"
        raise ValueError(f"must have one of {wanted}, got {' and '.join(found)}")
    return found[0] if found else None


def _answer(values: Mapping[str, Any]) -> str | None:
    key = _one_of(ANSWERS, values)
    answer = None if key is None else values[key]
    if answer is not None and not (isinstance(answer, str) and answer.strip()):
        raise ValueError(f"{key} must be a text that is not empty, or null")
    return answer


def _check_id(value: Any) -> RowId:
    value = whole_number(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"id must be text or a whole number, got {value!r}")
    if isinstance(value, str) and not _is_unicode(value):
        raise ValueError(f"id is not valid Unicode: {value!r}")
    return value


def _check_prompt(key: str, value: Any) -> str | list[int]:
    value = [whole_number(item) for item in value] if isinstance(value, list) else value
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not (isinstance(value, str) or is_ids):
        raise ValueError(f"{key} must be text or a list of token ids")
    if not value:
        raise ValueError(f"{key} is empty")
    return value


def _check_flag(key: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return bool(value)


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
