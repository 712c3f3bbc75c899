"""Reads JSON values by a JSON schema, as far as the fields of a request need one."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.documents import whole_number
from jaxspec.service.openai.errors import RequestError
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


def is_closed(schema: Schema) -> bool:
    """Whether an object may have no properties but those that its schema names."""
    return schema.get("additionalProperties", "properties" not in schema) is False


def read(name: str, value: Any, schema: Schema) -> Any:
    """The value as its readers take it.

    Keys with null are left out of objects of which the schema says what they hold, and a whole number is an
    int where the schema asks for one, however it is written.

    Args:
      name: the field, for the message; empty for a whole document.
      schema: with `type`, `enum`, `minimum`, `maximum`, `items`, `minItems`, `minLength`, `properties`,
        `required`, `additionalProperties`, `anyOf`, and `oneOf` for objects that differ in their "type";
        other words are for readers. An object with `properties` has no others, unless it says so.

    Raises:
      RequestError: it does not fit.
    """
    if "anyOf" in schema:
        return _read_any(name, value, schema["anyOf"])
    if "oneOf" in schema:
        return _read_object(name, value, _of_type(name, value, schema["oneOf"]))
    if "enum" in schema:
        if value not in schema["enum"] or isinstance(value, bool) is not isinstance(schema["enum"][0], bool):
            raise _error(name, value, " or ".join(map(repr, schema["enum"])))
        return value
    kind = schema.get("type")
    if kind is None:
        return value
    if kind == "integer":
        value = whole_number(value)
    if not _is_a(value, kind):
        raise _error(name, value, _wanted(schema))
    if kind == "array":
        return _read_list(name, value, schema)
    if kind == "object":
        return _read_object(name, value, schema)
    if kind in ("integer", "number"):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            raise _error(name, value, _wanted(schema))
    elif kind == "string" and len(value) < schema.get("minLength", 0):
        raise RequestError(f"{name} is empty", name)
    return value


def _read_list(name: str, value: list[Any], schema: Schema) -> list[Any]:
    if len(value) < schema.get("minItems", 0):
        raise RequestError(f"{name} is empty", name)
    items = schema.get("items", {})
    return [read(f"{name}[{index}]", item, items) for index, item in enumerate(value)]


def _read_object(name: str, value: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    at = lambda key: f"{name}.{key[:40]}" if name else key[:40]  # noqa: E731
    if is_closed(schema):
        for key in value:
            if key not in known:
                told = f"unknown field {key[:40]!r}; {known_names(key, known)}"
                raise RequestError(f"{name}: {told}" if name else told, at(key))
    tells = bool(known) or isinstance(others, Mapping)
    given = {key: item for key, item in value.items() if item is not None} if tells else value
    for key in schema.get("required", ()):
        if key not in given:
            raise RequestError(f"{at(key)} is missing", at(key))
    of_others = others if isinstance(others, Mapping) else {}
    return {key: read(at(key), item, known.get(key, of_others)) for key, item in given.items()}


def _of_type(name: str, value: Any, choices: list[Schema]) -> Schema:
    """The one of some objects' schemas that has the value's "type"."""
    if not isinstance(value, dict):
        raise _error(name, value, _NAMES["object"])
    named = {kind: schema for schema in choices for kind in schema["properties"]["type"]["enum"]}
    # Checks that the type is there and known.
    kind = _read_object(
        name,
        value,
        {"properties": {"type": {"enum": list(named)}}, "required": ["type"], "additionalProperties": True},
    )["type"]
    return named[kind]


def _read_any(name: str, value: Any, choices: list[Schema]) -> Any:
    """The value by the choice of its type, so that a message is about that one."""
    problems = []
    for schema in choices:
        try:
            return read(name, value, schema)
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
