"""Checks JSON values by a JSON schema, as far as the fields of a request need one."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.openai.errors import RequestError
from jaxspec.spelling import known_names

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
}


def check(name: str, value: Any, schema: Schema) -> None:
    """Checks a value.

    Args:
      name: the field, for the message.
      schema: with `type`, `enum`, `minimum`, `maximum`, `items`, `minItems`, `minLength`, `properties`,
        `required`, `additionalProperties` and `anyOf`; other words are for readers.

    Raises:
      RequestError: it does not fit.
    """
    if "anyOf" in schema:
        _check_any(name, value, schema["anyOf"])
        return
    if "enum" in schema:
        if value not in schema["enum"] or isinstance(value, bool) is not isinstance(schema["enum"][0], bool):
            raise _error(name, value, " or ".join(map(repr, schema["enum"])))
        return
    kind = schema.get("type")
    if kind is None:
        return
    if not _is_a(value, kind):
        raise _error(name, value, _wanted(schema))
    if kind in ("integer", "number"):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            raise _error(name, value, _wanted(schema))
    elif kind == "string" and len(value) < schema.get("minLength", 0):
        raise RequestError(f"{name} is empty", name)
    elif kind == "array":
        if len(value) < schema.get("minItems", 0):
            raise RequestError(f"{name} is empty", name)
        for index, item in enumerate(value):
            check(f"{name}[{index}]", item, schema.get("items", {}))
    elif kind == "object":
        _check_object(name, value, schema)


def _check_object(name: str, value: Mapping[str, Any], schema: Schema) -> None:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in known:
            check(f"{name}.{key}", item, known[key])
        elif others is False:
            raise RequestError(
                f"{name}: unknown field {key[:40]!r}; {known_names(key, known)}", f"{name}.{key[:40]}"
            )
        elif isinstance(others, Mapping):
            check(f"{name}.{key[:40]}", item, others)
    for key in schema.get("required", ()):
        if key not in value:
            raise RequestError(f"{name}.{key} is missing", f"{name}.{key}")


def _check_any(name: str, value: Any, choices: list[Schema]) -> None:
    """Checks a value by the choice of its type, so that the message is about that one."""
    problems = []
    for schema in choices:
        try:
            return check(name, value, schema)
        except RequestError as error:
            if _is_a(value, schema.get("type", "")):
                problems.append(error)
    if problems:
        # Of lists of different items, the one that fits furthest says best what is wrong.
        raise max(problems, key=lambda error: [int(at) for at in re.findall(r"\[(\d+)\]", error.field or "")])
    raise _error(name, value, ", ".join(map(_wanted, choices)))


def _is_a(value: Any, kind: str) -> bool:
    return (
        kind == "null"
        if value is None
        else (isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool)))
    )


def _wanted(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    kind, low, high = schema.get("type", ""), schema.get("minimum"), schema.get("maximum")
    name = _NAMES.get(kind, kind or "anything")
    if low is None and high is None:
        return name
    span = f"{low} to {high}" if low is not None and high is not None else f"{low} or more"
    return f"{name}, {span}" if low is not None else f"{name}, at most {high}"


def _error(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r}", name)
