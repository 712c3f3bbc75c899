"""JSON schemas whose values a finite automaton can tell from others.

Values are written as `json.dumps` writes them: `{"a": 1, "b": [true, null]}`, the properties in the order of
the schema. What a schema asks and this cannot keep is refused by name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from jaxspec.documents import whole_number
from jaxspec.grammar.characters import EVERY, Ranges, minus, ranges, single
from jaxspec.grammar.expression import (
    Chain,
    Chars,
    Either,
    Expression,
    Listed,
    Repeat,
    Separated,
    chain,
    text,
)
from jaxspec.grammar.regex import regex_expression
from jaxspec.grammar.work import Work
from jaxspec.sampling.grammar import GrammarError

_SAYS_NOTHING = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions"),
}
_OF_TYPE = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
}
_NAMED = ("object", "array")
"""The types that a schema may leave out where a keyword says which it is."""
_NOT_AS_THEY_ARE: Ranges = ranges([*single('"\\'), (0, 0x1F), (0x7F, 0x9F)])
"""Characters that a JSON string must escape, or that are invisible."""
_CHARACTER = Either((Chars(minus(EVERY, _NOT_AS_THEY_ARE)), chain(text("\\"), Chars(single('"\\/bfnrt')))))
_STRING = chain(text('"'), Repeat(_CHARACTER, 0, None), text('"'))
_DAYS = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_NAME = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_FORMATS = {
    "date": _DAYS,
    "time": _TIME,
    "date-time": f"{_DAYS}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@(?:[a-z0-9]+(?:-[a-z0-9]+)*\.)+[a-z]{2,}",
    "uri": r"https?://(?:[a-z0-9]+(?:-[a-z0-9]+)*\.)*[a-z0-9]+(?:-[a-z0-9]+)*(?::\d{1,4})?"
    r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(?:#[A-Za-z0-9._~-]*)?",
}
_FREE_DEPTH = 3
"""How deep values are nested of which a schema says nothing; a finite automaton knows no endless depth."""
_MAX_DEPTH = 32
_MAX_PARTS = 1 << 12
"""The most schemas."""
_COMPARISON = 5
"""Steps to compare two schemas."""


def json_schema_expression(schema: Any) -> Expression:
    """The expression of the values of a schema.

    Raises:
      GrammarError: the schema is malformed, refers to itself, or asks for what is not supported; the text
        names the place.
    """
    return _Reader(schema).value(schema, "$", ())


@dataclass(frozen=True)
class _Told:
    """What tells the values of a schema from those of others.

    Attributes:
      values: the only values, as JSON; None if there may be others.
      kinds: their types, as they are written; empty if the schema says nothing of them.
      is_open: whether values of other types fit, too, as where keywords alone say what is written.
      required: the properties that are always there, with their schemas.
    """

    values: set[str] | None
    kinds: set[str]
    is_open: bool
    required: Mapping[str, Any]


class _Reader:
    def __init__(self, schema: Any):
        self._root = schema
        self._parts = 0
        self._work = Work()
        self._read: dict[str, Expression] = {}  # by reference
        self._told: dict[int, _Told] = {}  # by the schema's id

    def value(self, schema: Any, at: str, path: tuple[str, ...]) -> Expression:
        """The expression of the schema at a place; `path` has the references that led to it."""
        self._parts += 1
        if self._parts > _MAX_PARTS or at.count(".") + at.count("[") > _MAX_DEPTH:
            raise GrammarError(
                f"json_schema is too large: more than {_MAX_PARTS} parts, or {_MAX_DEPTH} deep"
            )
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise GrammarError(f"json_schema at {at}: must be an object or true, got {schema!r}")
        asked = _asked(schema)
        for name, read in _WHOLE.items():
            if name in asked:
                return read(self, asked, at, path)
        if not asked:
            return _free(_FREE_DEPTH)
        types = self._types(asked, at)
        for name in asked:
            if name != "type" and not any(name in _OF_TYPE[kind] for kind in types):
                raise GrammarError(f"json_schema at {at}: {name!r} is not supported")
        return _either([_KINDS[kind](self, asked, at, path) for kind in types])

    def _types(self, asked: Mapping[str, Any], at: str) -> list[str]:
        given = asked.get("type")
        if given is None:
            given = [kind for kind in _NAMED if _OF_TYPE[kind] & asked.keys()]
            if len(given) != 1:
                name = next(name for name in asked)
                raise GrammarError(f"json_schema at {at}: {name!r} without a type is not supported")
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list) or not kinds or not all(kind in _OF_TYPE for kind in map(str, kinds)):
            raise GrammarError(
                f"json_schema at {at}: type must be among {', '.join(_OF_TYPE)}, got {given!r}"
            )
        # An integer is a number too.
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def ref(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        _alone("$ref", asked, at)
        name = asked["$ref"]
        if not isinstance(name, str) or name in path:
            if not isinstance(name, str):
                self._found(name, at)
            raise GrammarError(f"json_schema at {at}: {name} refers to itself, which no finite automaton can")
        if name not in self._read:
            self._read[name] = self.value(self._found(name, at), at, (*path, name))
        return self._read[name]

    def any_of(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        _alone("anyOf", asked, at)
        return _either([self.value(s, at, path) for s in _schemas(asked["anyOf"], at, "anyOf")])

    def one_of(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        _alone("oneOf", asked, at)
        schemas = _schemas(asked["oneOf"], at, "oneOf")
        if not all(self._are_apart(one, other, at) for one, other in combinations(schemas, 2)):
            raise GrammarError(
                f"json_schema at {at}: a value may fit several schemas of oneOf, which is not "
                "supported; use anyOf"
            )
        return _either([self.value(schema, at, path) for schema in schemas])

    def _are_apart(self, one: Any, other: Any, at: str) -> bool:
        """Whether no value fits both schemas: by their types, their values, or a property of both."""
        self._work.count(_COMPARISON)
        first, second = self._tell(one, at), self._tell(other, at)
        if first is None or second is None:
            return False
        if first.values is not None and second.values is not None:
            self._work.count(min(len(first.values), len(second.values)) // _COMPARISON)
            return first.values.isdisjoint(second.values)
        kinds = (first.kinds, second.kinds)
        if not all(kinds):
            return False
        if not (kinds[0] & kinds[1] or all({"integer", "number"} & each for each in kinds)):
            return not (first.is_open or second.is_open)
        return kinds == ({"object"}, {"object"}) and any(
            self._are_apart(schema, second.required[name], at)
            for name, schema in first.required.items()
            if name in second.required
        )

    def _tell(self, schema: Any, at: str) -> "_Told | None":
        """What tells the values of a schema from those of others; None if it is no mapping."""
        if id(schema) not in self._told:
            resolved = self._resolved(schema, at)
            if not isinstance(resolved, Mapping):
                return None
            asked = _asked(resolved)
            name = next((name for name in ("const", "enum") if name in asked), None)
            values = None if name is None else self._fitting(name, asked, at)
            properties, kinds = _properties(asked, at), set()
            if values is not None:
                kinds = {kind for kind in _OF_TYPE for value in values if _is_a(value, kind)}
            elif "type" in asked or any(_OF_TYPE[kind] & asked.keys() for kind in _NAMED):
                kinds = set(self._types(asked, at))
            self._told[id(schema)] = _Told(
                None if values is None else {_written(_plain(value), at, sort_keys=True) for value in values},
                kinds,
                values is None and "type" not in asked,
                {name: properties[name] for name in _required(asked, at) if name in properties},
            )
        return self._told[id(schema)]

    def _resolved(self, schema: Any, at: str) -> Any:
        """A schema that is no reference; one that refers to itself is refused where it is read."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._found(schema["$ref"], at)
        return schema

    def _found(self, name: Any, at: str) -> Any:
        """The part of the schema that a reference names."""
        found = self._root
        parts = name.split("/") if isinstance(name, str) else [""]
        for part in parts[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise GrammarError(f"json_schema at {at}: $ref must name a part of the schema, got {name!r}")
        return found

    def all_of(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        _alone("allOf", asked, at)
        schemas = _schemas(asked["allOf"], at, "allOf")
        if len(schemas) > 1:
            raise GrammarError(f"json_schema at {at}: allOf of several schemas is not supported")
        return self.value(schemas[0], at, path)

    def const(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        return self._values("const", asked, at)

    def enum(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        return self._values("enum", asked, at)

    def _values(self, name: str, asked: Mapping[str, Any], at: str) -> Expression:
        others = sorted(asked.keys() - {name, "type"})
        if others:
            raise GrammarError(f"json_schema at {at}: {others[0]!r} beside {name!r} is not supported")
        return _either([text(_written(value, at)) for value in self._fitting(name, asked, at)])

    def _fitting(self, name: str, asked: Mapping[str, Any], at: str) -> list[Any]:
        """The values of `const` or `enum` that have the type."""
        values = [asked[name]] if name == "const" else _list(asked[name], at, name)
        kinds = self._types(asked, at) if "type" in asked else list(_OF_TYPE)
        fitting = [value for value in values if any(_is_a(value, kind) for kind in kinds)]
        if not fitting:
            raise GrammarError(f"json_schema at {at}: no value of {name!r} has the type")
        return fitting

    def string(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        low, high = _bounds(asked, "minLength", "maxLength", at)
        given = [name for name in ("pattern", "format") if name in asked]
        if len(given) > 1 or (given and (low or high is not None)):
            raise GrammarError(f"json_schema at {at}: {given[0]!r} beside another limit is not supported")
        if not given:
            return (
                chain(text('"'), Repeat(_CHARACTER, low, high), text('"'))
                if low or high is not None
                else _STRING
            )
        pattern = asked[given[0]]
        if not isinstance(pattern, str):
            raise GrammarError(f"json_schema at {at}: {given[0]} must be a string, got {pattern!r}")
        if given[0] == "format":
            if pattern not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise GrammarError(f"json_schema at {at}: format {pattern!r} is not supported; {known} are")
            pattern = _FORMATS[pattern]
        try:
            inner = regex_expression(pattern, self._work, without=_NOT_AS_THEY_ARE, is_of_json=True)
        except GrammarError as error:
            raise GrammarError(f"json_schema at {at}: {error}") from None
        return chain(text('"'), inner, text('"'))

    def integer(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        limits = {name: whole_number(asked[name]) for name in _OF_TYPE["integer"] if name in asked}
        for name, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 10**18:
                raise GrammarError(
                    f"json_schema at {at}: {name} must be an integer below 10**18, got {value!r}"
                )
        lows = [*_given(limits, "minimum"), *(value + 1 for value in _given(limits, "exclusiveMinimum"))]
        highs = [*_given(limits, "maximum"), *(value - 1 for value in _given(limits, "exclusiveMaximum"))]
        return _integers(max(lows, default=None), min(highs, default=None), at)

    def number(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        return _NUMBER

    def array(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        low, high = _bounds(asked, "minItems", "maxItems", at)
        if asked.get("uniqueItems"):
            raise GrammarError(f"json_schema at {at}: 'uniqueItems' is not supported")
        first = _schemas(asked.get("prefixItems", []), at, "prefixItems", may_be_empty=True)
        items = asked.get("items", not first)
        if items is False:
            high = min(len(first), high if high is not None else len(first))
        leading = [self.value(s, f"{at}[{i}]", path) for i, s in enumerate(first)]
        if high is not None and low > high:
            raise GrammarError(f"json_schema at {at}: no array has at least {low} and at most {high} items")
        rest = self._inner(items, f"{at}[]", path) if items is not False else None
        return chain(text("["), _items(leading, rest, low, high), text("]"))

    def _inner(self, schema: Any, at: str, path: tuple[str, ...]) -> Expression:
        """The items of an array or the values of an object, of which the schema may say nothing."""
        return _free(_FREE_DEPTH - 1) if schema is True or schema == {} else self.value(schema, at, path)

    def object(self, asked: Mapping[str, Any], at: str, path: tuple[str, ...]) -> Expression:
        properties, required = _properties(asked, at), _required(asked, at)
        others = asked.get("additionalProperties")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise GrammarError(
                f"json_schema at {at}: {unknown[0]!r} is required but not among the properties"
            )
        low, high = _bounds(asked, "minProperties", "maxProperties", at)
        if properties:
            if isinstance(others, Mapping) or low > len(required) or high is not None:
                raise GrammarError(
                    f"json_schema at {at}: properties with further ones of a schema, or with limits of their "
                    "number, are not supported"
                )
            parts = [
                (
                    chain(text(_written(name, at) + ": "), self.value(schema, f"{at}.{name}", path)),
                    name not in required,
                )
                for name, schema in properties.items()
            ]
            return chain(text("{"), Listed(tuple(parts), text(", ")), text("}"))
        if others is False or high == 0:
            return text("{}")
        if low > 1:
            raise GrammarError(
                f"json_schema at {at}: minProperties above 1 is not supported: names may repeat"
            )
        others = True if others is None else others
        one = chain(_STRING, text(": "), self._inner(others, f"{at}.*", path))
        return chain(text("{"), _items([], one, low, high), text("}"))


def _items(leading: Sequence[Expression], rest: Expression | None, low: int, high: int | None) -> Expression:
    """`low` to `high` items with ", " between them, the first ones as `leading` says."""
    comma = text(", ")
    most = high if rest is None or high is not None else None
    first = [*leading[: most if most is not None else len(leading)]]
    needed = low - len(first)
    tail: Expression | None = None
    if rest is not None and (most is None or most > len(first)):
        further = None if most is None else most - len(first)
        if not first and low < 2 and further is None:
            return Separated(rest, comma, may_be_missing=not low)
        if not first:
            more = Repeat(chain(comma, rest), max(low - 1, 0), None if further is None else further - 1)
            some = chain(rest, more)
            return some if low else Repeat(some, 0, 1)
        tail = Repeat(chain(comma, rest), max(needed, 0), further)
    # From the last to the first, since an item may only come after those before it.
    expression: Expression = tail or Chain(())
    for index in range(len(first) - 1, -1, -1):
        item = first[index] if index == 0 else chain(comma, first[index])
        expression = chain(item, expression)
        if index >= low:
            expression = Repeat(expression, 0, 1)
    return expression


def _free(depth: int) -> Expression:
    """Any value, with arrays and objects at most so deep in one another."""
    plain = (_STRING, _NUMBER, *map(text, ("true", "false", "null")))
    if not depth:
        return Either(plain)
    inner = _free(depth - 1)
    pair = chain(_STRING, text(": "), inner)
    return Either(
        (
            *plain,
            chain(text("["), _items([], inner, 0, None), text("]")),
            chain(text("{"), _items([], pair, 0, None), text("}")),
        )
    )


def _digits(low: str, high: str) -> Expression:
    """Numbers of as many digits from `low` to `high`."""
    if not low:
        return Chain(())
    first, last = int(low[0]), int(high[0])
    digit: Callable[[int, int], Expression] = lambda a, b: Chars(((ord("0") + a, ord("0") + b),))  # noqa: E731
    if first == last:
        return chain(digit(first, first), _digits(low[1:], high[1:]))
    rest = len(low) - 1
    parts = []
    if low[1:].strip("0"):
        parts.append(chain(digit(first, first), _digits(low[1:], "9" * rest)))
        first += 1
    if high[1:].strip("9"):
        parts.append(chain(digit(last, last), _digits("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(chain(digit(first, last), Repeat(digit(0, 9), rest, rest)))
    return _either(parts)


def _natural(low: int, high: int | None) -> Expression:
    """Numbers from `low`, 0 or more, to `high`."""
    parts, digits = [], len(str(low))
    while high is None or digits <= len(str(high)):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        parts.append(_digits(str(first), str(last)))
        digits += 1
        if high is None:
            longer = chain(Chars(((ord("1"), ord("9")),)), Repeat(_DIGIT, digits - 1, None))
            return _either([*parts, longer])
    return _either(parts)


def _integers(low: int | None, high: int | None, at: str) -> Expression:
    if low is not None and high is not None and low > high:
        raise GrammarError(f"json_schema at {at}: no integer is at least {low} and at most {high}")
    parts: list[Expression] = []
    if high is None or high >= 0:
        parts.append(_natural(max(low or 0, 0), high))
    if low is None or low < 0:
        nearest = 1 if high is None else max(-high, 1)
        parts.append(chain(text("-"), _natural(nearest, None if low is None else -low)))
    return _either(parts)


def _either(parts: Sequence[Expression]) -> Expression:
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


_DIGIT = Chars(((ord("0"), ord("9")),))
_NUMBER = regex_expression(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", Work())
_WHOLE: dict[str, Callable[[_Reader, Mapping[str, Any], str, tuple[str, ...]], Expression]] = {
    "$ref": _Reader.ref,
    "anyOf": _Reader.any_of,
    "oneOf": _Reader.one_of,
    "allOf": _Reader.all_of,
    "const": _Reader.const,
    "enum": _Reader.enum,
}
"""Keywords that say all of a value."""
_KINDS: dict[str, Callable[[_Reader, Mapping[str, Any], str, tuple[str, ...]], Expression]] = {
    "null": lambda *_: text("null"),
    "boolean": lambda *_: Either((text("true"), text("false"))),
    "integer": _Reader.integer,
    "number": _Reader.number,
    "string": _Reader.string,
    "array": _Reader.array,
    "object": _Reader.object,
}


def _asked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema asks for. Null asks for nothing, but for the value null."""
    return {
        name: given
        for name, given in schema.items()
        if name not in _SAYS_NOTHING and (given is not None or name == "const")
    }


def _properties(asked: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    properties = asked.get("properties", {})
    if not isinstance(properties, Mapping):
        raise GrammarError(f"json_schema at {at}: properties must be an object, got {properties!r}")
    return properties


def _required(asked: Mapping[str, Any], at: str) -> list[str]:
    required = asked.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"json_schema at {at}: required must be a list of names, got {required!r}")
    return required


def _alone(name: str, asked: Mapping[str, Any], at: str) -> None:
    others = sorted(asked.keys() - {name})
    if others:
        raise GrammarError(f"json_schema at {at}: {others[0]!r} beside {name!r} is not supported")


def _list(value: Any, at: str, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"json_schema at {at}: {name} must be a list, not empty, got {value!r}")
    return value


def _schemas(value: Any, at: str, name: str, may_be_empty: bool = False) -> list[Any]:
    return [] if may_be_empty and value == [] else _list(value, at, name)


def _bounds(asked: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    limits = {name: whole_number(asked[name]) for name in (low, high) if name in asked}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GrammarError(f"json_schema at {at}: {name} must be an integer, 0 or more, got {value!r}")
    least, most = limits.get(low, 0), limits.get(high)
    if most is not None and least > most:
        raise GrammarError(f"json_schema at {at}: {low} {least} is above {high} {most}")
    return least, most


def _given(values: Mapping[str, int], name: str) -> list[int]:
    return [values[name]] if name in values else []


def _plain(value: Any) -> Any:
    """A value of JSON with its whole numbers as integers, for comparing."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else whole_number(value)


def _written(value: Any, at: str, *, sort_keys: bool = False) -> str:
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
        written.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema at {at}: a value cannot be written as JSON: {error}") from None
    return written


def _is_a(value: Any, kind: str) -> bool:
    """Whether a value of Python is of a type of JSON."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": is_number and (isinstance(value, int) or value.is_integer()),
        "number": is_number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }[kind]
