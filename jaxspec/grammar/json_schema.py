"""JSON schemas whose values a finite automaton can tell from others.

Values are written as `json.dumps` writes them: `{"a": 1, "b": [true, null]}`, the properties in the order of
the schema. What a schema asks and this cannot keep is refused by name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from math import lcm
from typing import Any

from jaxspec.documents import whole_number
from jaxspec.grammar.byte_automaton import Budget, ByteAutomaton, byte_automaton
from jaxspec.grammar.characters import EVERY, Ranges, minus, ranges, single
from jaxspec.grammar.expression import (
    Both,
    Chain,
    Chars,
    Either,
    Expression,
    Listed,
    Repeat,
    Separated,
    chain,
    either,
    text,
)
from jaxspec.grammar.numbers import Bound, at_least, at_most, integers, multiples
from jaxspec.grammar.regex import regex_expression, schema_pattern_expression
from jaxspec.grammar.schema_forms import (
    Form,
    Forms,
    Recursion,
    Schema,
    canonical,
    closest,
    kind_of,
    written,
)
from jaxspec.grammar.work import Nothing, TooLarge, Work
from jaxspec.sampling.grammar import GrammarError

_NOT_AS_THEY_ARE: Ranges = ranges([*single('"\\'), (0, 0x1F), (0x7F, 0x9F)])
"""Characters that a JSON string must escape, or that are invisible."""
_CHARACTER = Either((Chars(minus(EVERY, _NOT_AS_THEY_ARE)), chain(text("\\"), Chars(single('"\\/bfnrt')))))
_CHARACTERS = Repeat(_CHARACTER, 0, None)
_STRING = chain(text('"'), _CHARACTERS, text('"'))
_PLAIN = Repeat(Chars(minus(((0x20, 0x7E),), single('"\\'))), 0, None)
"""Strings of which nobody's patterns think differently."""
_DAYS = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABELS = r"(?:[a-z0-9]+(?:-[a-z0-9]+)*\.)*[a-z0-9]+(?:-[a-z0-9]+)*"
_PATH = r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(?:#[A-Za-z0-9._~-]*)?"
_URI = rf"https?://{_LABELS}(?::\d{{1,4}})?{_PATH}"
_EMAIL = r"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@(?:[a-z0-9]+(?:-[a-z0-9]+)*\.)+[a-z]{2,}"
_HOST = (
    r"[a-z](?:[a-z0-9]{0,19}(?:-[a-z0-9]{1,20}){0,2})(?:\.[a-z][a-z0-9]{0,19}(?:-[a-z0-9]{1,20}){0,2}){0,3}"
)
_FORMATS = {
    "date": _DAYS,
    "time": _TIME,
    "date-time": f"{_DAYS}T{_TIME}",
    "duration": r"P(?:\d{1,4}[DW]|(?:\d{1,4}D)?T(?:\d{1,4}H(?:\d{1,4}M)?|(?:\d{1,4}M)?\d{1,4}S))",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}|::(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,5})?",
    **dict.fromkeys(("email", "idn-email"), _EMAIL),
    **dict.fromkeys(("uri", "iri", "uri-template"), _URI),
    **dict.fromkeys(("uri-reference", "iri-reference"), rf"{_URI}|/?[A-Za-z0-9._~-]+{_PATH}"),
    **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9]\d{0,5})(?:#|(?:/(?:[^/~]|~[01])*)*)",
}
"""Those of which the standard says what they mean; what others mean is not known, so they say nothing."""
_REFUSED_FORMATS = {"regex"}
_INTEGERS = {
    f"{name}{bits}": ((Fraction(-low), False), (Fraction(2 ** (bits - bool(low)) - 1), False))
    for bits in (8, 16, 32, 64)
    for name, low in (("int", 2 ** (bits - 1)), ("uint", 0))
}
"""Formats of integers, as OpenAPI has them, with their bounds."""
_LARGEST = 10**309
_MOST_REMAINDERS = 1 << 12
_FREE_DEPTH = 3
"""How deep values are nested of which a schema says nothing; a finite automaton knows no endless depth."""
_NESTED = 2
"""How often a schema is in itself that refers to itself."""
_MAX_DEPTH = 32
_MAX_PARTS = 1 << 12
"""The most schemas."""


def json_schema_automaton(schema: Any) -> ByteAutomaton:
    """The automaton of the values of a schema.

    Raises:
      GrammarError: the schema is malformed, too large, or asks for what is not supported; the text names the
        place.
    """
    recursive: dict[str, int] = {}
    nested, work = _NESTED, Work()
    while True:
        writer = _Writer(schema, recursive, work)
        try:
            return byte_automaton(writer.value((writer.forms.root,), "$", 0))
        except Recursion as recursion:
            recursive[str(recursion)] = nested
        except TooLarge:
            if not recursive or nested == 1:
                raise
            nested, work = nested - 1, Work()
            recursive = dict.fromkeys(recursive, nested)


class _Writer:
    def __init__(self, schema: Any, recursive: Mapping[str, int], work: Work):
        self._work = work
        self._budget = Budget()
        self._automata: dict[str, ByteAutomaton] = {}
        self._known: dict[Any, tuple[Schema, Expression]] = {}
        self._count = 0
        self.forms = Forms(schema, self._work, self._matches, recursive)

    def value(self, schema: Schema, at: str, depth: int) -> Expression:
        """The expression of the values of a schema at a place.

        Raises:
          Nothing: no value fits.
        """
        key = tuple((id(part.schema), part.base, part.entered) for part in schema)
        if key not in self._known:
            self._count += 1
            if self._count > _MAX_PARTS or depth > _MAX_DEPTH:
                raise TooLarge(
                    f"json_schema is too large: more than {_MAX_PARTS} parts, or {_MAX_DEPTH} deep"
                )
            forms = self.forms.read(schema, at)
            self._known[key] = schema, _any_of([partial(self._form, form, at, depth) for form in forms], at)
        return self._known[key][1]

    def _form(self, form: Form, at: str, depth: int) -> Expression:
        if form == _ANY:
            return _free(_FREE_DEPTH)
        if form.values is not None:
            fitting = [value for value in form.values.values() if self.forms.fits(value, form, at)]
            if not fitting:
                raise Nothing(
                    f"json_schema at {at}: no value of 'enum' has the type and what else is asked for"
                )
            return either([text(written(value, at)) for value in fitting])
        kinds = form.written
        numbers = kinds & {"integer", "fraction"}
        parts: list[Callable[[], Expression]] = [
            partial(_KINDS[kind], self, form, at, depth)
            for kind in ("null", "boolean", "string", "array", "object")
            if kind in kinds
        ]
        if numbers:
            parts.insert(len(kinds & {"null", "boolean"}), partial(self._number, form, at, numbers))
        return _any_of(parts, at)

    def _matches(self, pattern: str, value: str) -> bool:
        """Whether a pattern matches somewhere in a text."""
        if pattern not in self._automata:
            expression = schema_pattern_expression(pattern, self._work, is_search=True)
            self._automata[pattern] = byte_automaton(expression, self._budget)
        automaton, state = self._automata[pattern], 0
        self._work.count(len(value))
        for byte in value.encode(errors="replace"):
            state = int(automaton.next[state, byte]) if state >= 0 else -1
        return state >= 0 and bool(automaton.is_final[state])

    def _null(self, form: Form, at: str, depth: int) -> Expression:
        return self._named(("null",), (None,), form, at)

    def _boolean(self, form: Form, at: str, depth: int) -> Expression:
        return self._named(("true", "false"), (True, False), form, at)

    def _named(self, names: Sequence[str], values: Sequence[Any], form: Form, at: str) -> Expression:
        left = [
            name for name, value in zip(names, values, strict=True) if canonical(value) not in form.excluded
        ]
        if not left:
            raise Nothing(f"json_schema at {at}: no value is left")
        return either([*map(text, left)])

    def _number(self, form: Form, at: str, numbers: frozenset[str]) -> Expression:
        low, high = form.low, form.high
        if "number" in form.refused:
            raise GrammarError(f"json_schema at {at}: {form.refused['number']!r} is not supported")
        if any(bound is not None and abs(bound[0]) > _LARGEST for bound in (low, high)):
            raise GrammarError(f"json_schema at {at}: bounds above 1e309 are not supported")
        if numbers == {"integer"}:
            for name in form.formats:
                least, most = _INTEGERS.get(name, (None, None))
                low = closest([each for each in (low, least) if each], max)
                high = closest([each for each in (high, most) if each], min)
        of = 1
        for multiple in form.multiples:
            of = lcm(of, multiple.numerator)
            if "integer" not in numbers or (
                multiple.denominator != 1 and (numbers != {"integer"} or 1 / multiple % 1)
            ):
                raise GrammarError(f"json_schema at {at}: 'multipleOf' with a fraction is not supported")
        excluded = [str(whole_number(value)) for value in form.excluded.values() if kind_of(value) in numbers]
        if form.multiples or numbers == {"integer"}:
            found = integers(low, high)
            if found is None:
                raise Nothing(
                    f"json_schema at {at}: no integer is at least {_shown(low)} and at most {_shown(high)}"
                )
            if of > _MOST_REMAINDERS:
                raise GrammarError(
                    f"json_schema at {at}: 'multipleOf' above {_MOST_REMAINDERS} is not supported"
                )
            parts = [found, *([multiples(of)] if of > 1 else [])]
            return _both(parts, [*map(text, excluded)])
        if excluded:
            raise GrammarError(f"json_schema at {at}: numbers other than some are not supported")
        parts = [_FRACTION] if numbers == {"fraction"} else [] if low or high else [_NUMBER]
        if low and high and (low[0], low[1] or high[1]) > (high[0], False):
            raise Nothing(
                f"json_schema at {at}: no number is at least {_shown(low)} and at most {_shown(high)}"
            )
        parts += [at_least(low)] if low else []
        parts += [at_most(high)] if high else []
        return _both(parts, [])

    def _string(self, form: Form, at: str, depth: int) -> Expression:
        return chain(text('"'), self._characters(form, at), text('"'))

    def _characters(self, form: Form, at: str) -> Expression:
        """What is between the quotation marks of a string."""
        low, high = _limits(form, "string", "Length", at)
        patterns = [
            *form.patterns,
            *(_FORMATS[name] for name in dict.fromkeys(form.formats) if name in _FORMATS),
        ]
        refused = next((name for name in form.formats if name in _REFUSED_FORMATS), None)
        if refused is not None:
            raise GrammarError(f"json_schema at {at}: format {refused!r} is not supported")
        parts = [self._pattern(pattern, at) for pattern in patterns]
        is_limited = low or high is not None
        if parts and is_limited:
            parts.append(Repeat(Chars(minus(EVERY, _NOT_AS_THEY_ARE)), low, high))
        elif is_limited:
            parts.append(Repeat(_CHARACTER, low, high))
        excluded = [_spelled(value) for value in form.excluded.values() if isinstance(value, str)]
        if form.unmatched:
            excluded += [
                schema_pattern_expression(each, self._work, is_search=True) for each in form.unmatched
            ]
            parts.append(_PLAIN)
        return _both(parts or [_CHARACTERS], excluded)

    def _array(self, form: Form, at: str, depth: int) -> Expression:
        if "array" in form.refused or any(isinstance(value, list) for value in form.excluded.values()):
            name = form.refused.get("array", "not")
            raise GrammarError(f"json_schema at {at}: {name!r} is not supported")
        low, high = _limits(form, "array", "Items", at)
        leading: list[Expression] = []
        rest: Expression | None = None
        try:
            for index, schema in enumerate(form.first):
                leading.append(self._inner(schema, f"{at}[{index}]", depth))
            if not form.first or form.rest or low > len(form.first):
                rest = self._inner(form.rest, f"{at}[]", depth)
        except Nothing:  # there are no more items
            rest = None
        if rest is None:
            high = min(len(leading), high if high is not None else len(leading))
        if high is not None and low > high:
            raise Nothing(f"json_schema at {at}: no array has at least {low} and at most {high} items")
        items = _items(leading, rest, low, high)
        if form.is_unique and (high is None or high > 1):
            items = self._unique(form, items, low, high, at)
        return chain(text("["), items, text("]"))

    def _unique(self, form: Form, items: Expression, low: int, high: int | None, at: str) -> Expression:
        """Items of which each is one of some values, in the order of these."""
        forms = self.forms.read(form.rest, at)
        if form.first or any(each.values is None for each in forms):
            raise GrammarError(f"json_schema at {at}: 'uniqueItems' is not supported")
        values = {
            key: value
            for each in forms
            for key, value in (each.values or {}).items()
            if self.forms.fits(value, each, at)
        }
        if low > len(values):
            raise Nothing(f"json_schema at {at}: no array has {low} different items")
        listed = Listed(tuple((text(written(value, at)), True) for value in values.values()), text(", "))
        return _both([listed, items] if low or high is not None else [listed], [])

    def _inner(self, schema: Schema, at: str, depth: int) -> Expression:
        """The items of an array or the values of an object, of which the schema may say nothing."""
        if all(part.schema is True or part.schema == {} for part in schema):
            return _free(_FREE_DEPTH - 1)
        return self.value(schema, at, depth + 1)

    def _object(self, form: Form, at: str, depth: int) -> Expression:
        if any(isinstance(value, dict) for value in form.excluded.values()):
            raise GrammarError(f"json_schema at {at}: 'not' of an object is not supported")
        low, high = _limits(form, "object", "Properties", at)
        names = {**form.properties, **dict.fromkeys(form.required)}
        parts: list[tuple[Expression, bool]] = []
        for name in names:
            is_required = name in form.required
            try:
                if form.names and not any(
                    self.forms.fits(name, each, at) for each in self.forms.read(form.names, at)
                ):
                    raise Nothing(
                        f"json_schema at {at}: the name {name!r} is not among those of propertyNames"
                    )
                value = self.value(self.forms.of_property(form, name), f"{at}.{name}", depth + 1)
            except Nothing:
                if is_required:
                    raise
                continue
            parts.append((chain(text(written(name, at) + ": "), value), not is_required))
        if parts:
            return chain(text("{"), self._counted(parts, low, high, at), text("}"))
        return chain(text("{"), self._map(form, low, high, at, depth), text("}"))

    def _counted(
        self, parts: list[tuple[Expression, bool]], low: int, high: int | None, at: str
    ) -> Expression:
        """Properties in order, so many of which are there."""
        needed = sum(not is_optional for _, is_optional in parts)
        if low > len(parts) or (high is not None and high < needed):
            raise Nothing(
                f"json_schema at {at}: {len(parts)} properties, {needed} of them required, are not "
                f"{low} or more and {'any' if high is None else high} or fewer"
            )
        if low <= needed and (high is None or high >= len(parts)):
            return Listed(tuple(parts), text(", "))
        self._work.count(len(parts) ** 2)

        @cache
        def behind(index: int, before: int) -> Expression | None:
            """The properties from one on, with so many before them."""
            if index == len(parts):
                return chain() if before >= low else None
            part, is_optional = parts[index]
            ways: list[Expression] = []
            if (high is None or before < high) and (rest := behind(index + 1, before + 1)) is not None:
                ways.append(chain(text(", "), part, rest) if before else chain(part, rest))
            if is_optional and (rest := behind(index + 1, before)) is not None:
                ways.append(rest)
            return either(ways) if ways else None

        found = behind(0, 0)
        assert found is not None
        return found

    def _map(self, form: Form, low: int, high: int | None, at: str, depth: int) -> Expression:
        """Properties of any names, or of those that patterns allow."""
        if high == 0:
            return chain()
        if low > 1:
            raise GrammarError(
                f"json_schema at {at}: minProperties above 1 is not supported: names may repeat"
            )
        excluded = [_spelled(name) for name in form.properties]
        pairs: list[tuple[Expression, Schema]] = [(_CHARACTERS, form.others)]
        if form.by_pattern:
            patterns = {name: self._pattern(name, at) for name in form.by_pattern}
            pairs = [(patterns[name], schema) for name, schema in form.by_pattern.items()]
            if len(pairs) > 1:
                searched = [schema_pattern_expression(name, self._work, is_search=True) for name in patterns]
                pairs = [
                    (Both((name, _PLAIN), tuple(each for j, each in enumerate(searched) if j != i)), schema)
                    for i, (name, schema) in enumerate(pairs)
                ]
        ways: list[Callable[[], Expression]] = []
        for name, schema in pairs:
            if form.names:
                name = self._names(form.names, name, at)
            key = chain(text('"'), _both([name], excluded), text('": '))
            ways.append(partial(self._pair, key, schema, f"{at}.*", depth, len(pairs) > 1))
        try:
            return _items([], _any_of(ways, at), low, high)
        except Nothing:
            if low:
                raise
            return chain()

    def _pair(self, key: Expression, schema: Schema, at: str, depth: int, may_be_nothing: bool) -> Expression:
        if may_be_nothing:
            byte_automaton(key, self._budget)  # or an error
        return chain(key, self._inner(schema, at, depth))

    def _pattern(self, pattern: str, at: str) -> Expression:
        try:
            return schema_pattern_expression(pattern, self._work, without=_NOT_AS_THEY_ARE)
        except GrammarError as error:
            raise GrammarError(f"json_schema at {at}: {error}") from None

    def _names(self, schema: Schema, name: Expression, at: str) -> Expression:
        """Names that also fit a schema."""
        strings = [form for form in self.forms.read(schema, at) if "string" in form.kinds]
        known: list[Expression] = [
            Either(tuple(_spelled(value) for value in form.values.values() if isinstance(value, str)))
            if form.values is not None
            else self._characters(form, at)
            for form in strings
        ]
        if not known:
            raise Nothing(f"json_schema at {at}: propertyNames allow none")
        return _both([either(known), *([name] if name is not _CHARACTERS else [])], [])


def _any_of(ways: list[Callable[[], Expression]], at: str) -> Expression:
    """What any of the ways gives, but for those of which there is nothing."""
    found, error = [], Nothing(f"json_schema at {at}: no value has all that is asked for")
    for index, way in enumerate(ways):
        try:
            found.append(way())
        except Nothing as nothing:
            error = nothing if not index else error
    if not found:
        raise error
    return either(found)


def _both(parts: list[Expression], without: list[Expression]) -> Expression:
    return parts[0] if len(parts) == 1 and not without else Both(tuple(parts), tuple(without))


def _spelled(value: str) -> Expression:
    """Every way that the inside of a string may be written."""
    parts: list[Expression] = []
    for character in value:
        escaped: Expression = text(json.dumps(character, ensure_ascii=False)[1:-1])
        parts.append(Either((text("/"), text("\\/"))) if character == "/" else escaped)
    return chain(*parts)


def _shown(bound: Bound | None) -> str:
    return "any" if bound is None else f"{'beyond ' if bound[1] else ''}{float(bound[0]):g}"


def _limits(form: Form, kind: str, name: str, at: str) -> tuple[int, int | None]:
    low, high = form.least.get(kind, 0), form.most.get(kind)
    if high is not None and low > high:
        raise Nothing(f"json_schema at {at}: min{name} {low} is above max{name} {high}")
    return low, high


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


_ANY = Form()
_DIGIT = Chars(((ord("0"), ord("9")),))
_NUMBER = regex_expression(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", Work())
_FRACTION = regex_expression(r"-?(?:0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]", Work())
_KINDS: dict[str, Callable[[_Writer, Form, str, int], Expression]] = {
    "null": _Writer._null,
    "boolean": _Writer._boolean,
    "string": _Writer._string,
    "array": _Writer._array,
    "object": _Writer._object,
}
