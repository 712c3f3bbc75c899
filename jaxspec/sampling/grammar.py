"""A grammar that an answer must follow, as a request says it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.errors import OneLineError

MAX_TEXT = 1 << 18
"""The most characters of a grammar."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must be.

    Attributes:
      kind: how it is said: one of some texts, a regular expression for the whole text, or a JSON schema.
      source: the pattern; the texts or the schema as JSON.
    """

    kind: Literal["choice", "regex", "json_schema"]
    source: str

    @classmethod
    def of_choice(cls, choice: Any) -> "Grammar":
        """One of a list of texts, none of them empty.

        Raises:
          GrammarError: it is no such list.
        """
        texts = list(choice) if isinstance(choice, list | tuple) else []
        if not texts or not all(isinstance(each, str) and each for each in texts):
            raise GrammarError(f"choice must be a list of strings, none of them empty, got {choice!r}")
        return cls("choice", _written("choice", texts))

    @classmethod
    def of_regex(cls, regex: Any) -> "Grammar":
        """What a regular expression matches from beginning to end.

        Raises:
          GrammarError: it is not a string.
        """
        if not isinstance(regex, str) or not regex:
            raise GrammarError(f"regex must be a string, not empty, got {regex!r}")
        _check_length("regex", regex)
        return cls("regex", regex)

    @classmethod
    def of_json_schema(cls, schema: Any) -> "Grammar":
        """A value of a JSON schema: a mapping, its text, or a class with `model_json_schema`, as pydantic's.

        Raises:
          GrammarError: it is none of these.
        """
        method = getattr(schema, "model_json_schema", None)
        if callable(method):
            schema = method()
        if isinstance(schema, str):
            _check_length("json_schema", schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"json_schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping):
            raise GrammarError(f"json_schema must be a schema as a mapping or as text, got {schema!r}")
        return cls("json_schema", _written("json_schema", schema))


def _written(name: str, value: Any) -> str:
    try:
        written = json.dumps(value, ensure_ascii=False)
        written.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{name} cannot be written as JSON: {error}") from None
    _check_length(name, written)
    return written


def _check_length(name: str, written: str) -> None:
    if len(written) > MAX_TEXT:
        raise GrammarError(f"{name} has {len(written)} characters, the limit is {MAX_TEXT}")


class GrammarError(OneLineError):
    """A grammar is malformed, not supported or too large; the text names what."""
