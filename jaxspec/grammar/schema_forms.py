"""What a JSON schema says, with all that stands beside and behind it in one place.

A schema is read as a list of forms, one of which a value must have. A form says all at once what the
keywords of a schema ask for, and those of schemas that it is combined with (`allOf`, `$ref`, a branch of
`anyOf`). Schemas inside of it, such as those of properties, are read when they are needed.

Forms may be narrower than their schema: of a `oneOf` whose branches share values, those that fit two are left
out. They may be read `wide`, too: then what a form says is true of every value of the schema, which tells
whether two schemas share any.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jaxspec.documents import whole_number
from jaxspec.grammar.work import TooLarge, Work
from jaxspec.sampling.grammar import GrammarError

KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""Of values; a fraction is a number that is no integer."""
_TYPES = {kind: frozenset({kind}) for kind in KINDS - {"fraction"}} | {
    "number": frozenset({"integer", "fraction"})
}
_OBJECT = frozenset({"object"})
_LENGTHS = {"Length": "string", "Items": "array", "Properties": "object"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KINDS_OF = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _TYPES["string"]),
    **dict.fromkeys((*_BOUNDS, "multipleOf", "divisibleBy"), _TYPES["number"]),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), _TYPES["array"]),
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), _TYPES["array"]),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), _OBJECT),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames", "dependentRequired"), _OBJECT),
    **dict.fromkeys(("dependentSchemas", "dependencies", "unevaluatedProperties"), _OBJECT),
}
"""Of which values a keyword says something."""
_OF_ALL = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "not", "if"}
_REFUSED = {"$dynamicRef", "$recursiveRef", "extends", "disallow"}
_REFUSED_OF_A_KIND = {"contains": "array", "divisibleBy": "number"}
_KEYWORDS = {*_KINDS_OF, *_OF_ALL, *_REFUSED, "then", "else"}
"""All other words say nothing of values."""
_OF_NAMES = {"properties", "patternProperties", "definitions", "$defs", "dependentSchemas", "dependencies"}
"""Keywords with schemas by name."""
_MERGE, _FITTING = 16, 8
"""Steps to make one form of two, and to compare a value with one."""
_MOST_FORMS = 1 << 10
_COMPARED_DEPTH = 4


class Recursion(Exception):
    """A schema refers to itself; it is to be read again with its place known."""


@dataclass(frozen=True)
class Part:
    """A schema as it stands.

    Attributes:
      schema: a mapping or a boolean, or a form.
      base: the address of the document that its references are relative to.
      path: the references that led to it, since the last one that schemas refer to in themselves.
      entered: those, as often as they led to it.
    """

    schema: Any
    base: str = ""
    path: frozenset[str] = frozenset()
    entered: tuple[str, ...] = ()


Schema = tuple[Part, ...]
"""All of the parts; none of them says nothing."""
NEVER: Schema = (Part(False),)
Bound = tuple[Fraction, bool]
"""Of a number, and whether it is not among them."""


@dataclass(frozen=True)
class Form:
    """What a value must be.

    Attributes:
      kinds: its kinds.
      told: kinds of which a keyword says something.
      values: the only values, if not None, by `canonical`.
      excluded: values that it is not, too.
      low, high: bounds of numbers.
      multiples: what numbers are multiples of.
      least, most: limits of the number of characters, items and properties, by the kind.
      patterns, formats: of strings.
      unmatched: patterns that strings do not have.
      properties: by name, together with `by_pattern` where a pattern matches the name.
      by_pattern, others: schemas of other properties by patterns of their names, and of all further ones.
      required: names of properties, each once.
      names: a schema of all names.
      first, rest: schemas of the first items and of all further ones.
      is_unique: whether no two items may be equal.
      refused: keywords that are not supported, by the kind of which they say something.
    """

    kinds: frozenset[str] = KINDS
    told: frozenset[str] = frozenset()
    values: Mapping[str, Any] | None = None
    excluded: Mapping[str, Any] = field(default_factory=dict)
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Fraction, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    properties: Mapping[str, Schema] = field(default_factory=dict)
    by_pattern: Mapping[str, Schema] = field(default_factory=dict)
    others: Schema = ()
    required: tuple[str, ...] = ()
    names: Schema = ()
    first: tuple[Schema, ...] = ()
    rest: Schema = ()
    is_unique: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def item(self, index: int) -> Schema:
        """The schema of an item."""
        return self.first[index] if index < len(self.first) else self.rest

    @property
    def written(self) -> frozenset[str]:
        """The kinds to write: where only keywords tell, those that they are about."""
        return self.kinds if self.kinds != KINDS or not self.told else self.told


class Forms:
    """Reads schemas of a document.

    Args:
      root: the document.
      work: counts the steps.
      matches: whether a pattern matches somewhere in a text.
      recursive: the places of schemas that refer to themselves; in themselves they are read so often.
    """

    def __init__(
        self,
        root: Any,
        work: Work,
        matches: Callable[[str, str], bool],
        recursive: Mapping[str, int],
    ):
        self._work, self._matches, self._recursive = work, matches, recursive
        draft = root.get("$schema") if isinstance(root, Mapping) else None
        self._id = "id" if any(name in str(draft) for name in ("draft-03", "draft-04")) else "$id"
        self._is_old = any(f"draft-0{number}" in str(draft) for number in (3, 4, 6, 7))
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._index(root)
        self.root = Part(root)

    def _index(self, root: Any) -> None:
        """Finds the addresses and anchors of schemas."""
        waiting: list[tuple[Any, str]] = [(root, "")]
        while waiting:
            schema, base = waiting.pop()
            self._work.count(1)
            if isinstance(schema, list):
                waiting += [(each, base) for each in schema]
            elif isinstance(schema, Mapping):
                base, anchor = self._address(schema, base)
                self._resources.setdefault(base, schema)
                for name in (anchor, schema.get("$anchor")):
                    if name and isinstance(name, str):
                        self._anchors.setdefault((base, name), schema)
                for name, inner in schema.items():
                    if name in _OF_NAMES and isinstance(inner, Mapping):
                        waiting += [(each, base) for each in inner.values()]
                    elif name in _KEYWORDS and name not in ("enum", "const"):
                        waiting.append((inner, base))

    def _address(self, schema: Any, base: str) -> tuple[str, str]:
        """The address of the document that a schema is in, and the anchor that it names itself by."""
        if not isinstance(schema, Mapping) or (self._is_old and "$ref" in schema):
            return base, ""
        own = schema.get(self._id)
        return _joined(base, own) if isinstance(own, str) else (base, "")

    def read(self, schema: Schema, at: str, *, is_wide: bool = False) -> list[Form]:
        """The forms of a schema at a place; none if no value fits.

        Raises:
          GrammarError: it is malformed or not supported.
        """
        forms = [Form()]
        for part in schema:
            forms = self._all(forms, self._of(part, at, is_wide), at)
        return forms

    def _all(self, some: list[Form], others: list[Form], at: str) -> list[Form]:
        self._work.count(_MERGE * len(some) * len(others))
        if len(some) * len(others) > _MOST_FORMS:
            raise TooLarge(f"json_schema at {at}: more than {_MOST_FORMS} combinations of schemas")
        merged = (self._both(one, other, at) for one, other in product(some, others))
        return [form for form in merged if form.kinds]

    def _of(self, part: Part, at: str, is_wide: bool) -> list[Form]:
        schema = part.schema
        if isinstance(schema, Form):
            return [schema]
        if isinstance(schema, bool):
            return [Form()] if schema else []
        if not isinstance(schema, Mapping):
            raise GrammarError(f"json_schema at {at}: must be an object or true, got {schema!r}")
        part = replace(part, base=self._address(schema, part.base)[0])
        # Null asks for nothing, but for the value null.
        asked = {
            name: given
            for name, given in schema.items()
            if name in _KEYWORDS and (given is not None or name == "const")
        }
        refused = next((name for name in asked if name in _REFUSED), None)
        if refused is not None:
            raise GrammarError(f"json_schema at {at}: {refused!r} is not supported")
        forms = [self._own(asked, part, at)]
        if "$ref" in asked:
            found = self._found(asked["$ref"], part, at)
            of_it = [Form()] * is_wide if found is None else self._of(found, at, is_wide)
            forms = self._all(forms, of_it, at)
        for name in ("allOf", "anyOf"):
            if name in asked:
                each = [self._of(inner, at, is_wide) for inner in _parts(asked[name], part, at, name)]
                if name == "anyOf":
                    each = [[form for some in each for form in some]]
                for some in each:
                    forms = self._all(forms, some, at)
        for options in () if is_wide else self._implied(asked, part, at):
            forms = self._all(forms, [form for each in options for form in self._of(each, at, False)], at)
        if "oneOf" in asked:
            forms = self._one_of(forms, _parts(asked["oneOf"], part, at, "oneOf"), at, is_wide)
        return [self._evaluated(form, asked, part, at) for form in forms]

    def _evaluated(self, form: Form, asked: Mapping[str, Any], part: Part, at: str) -> Form:
        """Adds what says something of properties and items of which nothing else does."""
        given = [name for name in ("unevaluatedProperties", "unevaluatedItems") if name in asked]
        if not given:
            return form
        if implied := asked.keys() & {"not", "if", "dependencies", "dependentSchemas"}:
            raise GrammarError(f"json_schema at {at}: {given[0]!r} beside {min(implied)!r} is not supported")
        if given[0] == "unevaluatedProperties" and not form.others:
            form = replace(form, others=(replace(part, schema=asked[given[0]]),))
        if given[-1] == "unevaluatedItems" and not form.rest:
            form = replace(form, rest=(replace(part, schema=asked[given[-1]]),))
        return form

    def _own(self, asked: Mapping[str, Any], part: Part, at: str) -> Form:
        """What the keywords of a schema say that need no other schema."""
        inner: Callable[[Any], Schema] = lambda schema: (replace(part, schema=schema),)  # noqa: E731
        low, high = self._bounds(asked, at)
        properties = _mapping(asked, "properties", at)
        by_pattern = {name: inner(each) for name, each in _mapping(asked, "patternProperties", at).items()}
        items = asked.get("items")
        first = asked.get("prefixItems", items if isinstance(items, list) else [])
        if not isinstance(first, list):
            raise GrammarError(f"json_schema at {at}: prefixItems must be a list, got {first!r}")
        rest = asked.get("additionalItems") if isinstance(items, list) else items
        required = asked.get("required", [])
        if isinstance(required, bool):  # of draft 3, where a property says that it is required
            required = []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError(f"json_schema at {at}: required must be a list of names, got {required!r}")
        needed = (
            name
            for name, each in properties.items()
            if isinstance(each, Mapping) and each.get("required") is True
        )
        least, most = _limits(asked, at)
        return Form(
            kinds=_kinds(asked["type"], at) if "type" in asked else KINDS,
            told=frozenset[str]().union(*(_KINDS_OF.get(name, ()) for name in asked)),
            values=_values(asked, at),
            low=low,
            high=high,
            multiples=_multiples(asked, at),
            least=least,
            most=most,
            patterns=_text(asked, "pattern", at),
            formats=_text(asked, "format", at),
            properties={
                name: (*inner(each), *self._by_patterns(by_pattern, name))
                for name, each in properties.items()
            },
            by_pattern=by_pattern,
            others=inner(asked["additionalProperties"]) if "additionalProperties" in asked else (),
            required=tuple(dict.fromkeys((*required, *needed))),
            names=inner(asked["propertyNames"]) if "propertyNames" in asked else (),
            first=tuple(map(inner, first)),
            rest=() if rest is None else inner(rest),
            is_unique=bool(asked.get("uniqueItems")),
            refused={kind: name for name, kind in _REFUSED_OF_A_KIND.items() if name in asked},
        )

    def _bounds(self, asked: Mapping[str, Any], at: str) -> tuple[Bound | None, Bound | None]:
        bounds: list[Bound | None] = []
        for name, closer in (("minimum", max), ("maximum", min)):
            strict = "exclusive" + name.capitalize()
            given = {each: asked[each] for each in (name, strict) if each in asked}
            is_strict = given.get(strict) if isinstance(given.get(strict), bool) else None  # of draft 4
            found = []
            for each, value in given.items():
                if each == strict and is_strict is not None:
                    continue
                number = whole_number(value)
                if (
                    isinstance(number, bool)
                    or not isinstance(number, int | float)
                    or not math.isfinite(number)
                ):
                    raise GrammarError(f"json_schema at {at}: {each} must be a number, got {value!r}")
                found.append((Fraction(str(number)), bool(is_strict) or each == strict))
            bounds.append(closest(found, closer))
        return bounds[0], bounds[1]

    def _by_patterns(self, by_pattern: Mapping[str, Schema], name: str) -> Schema:
        return tuple(
            part for pattern, schema in by_pattern.items() if self._matches(pattern, name) for part in schema
        )

    def of_property(self, form: Form, name: str) -> Schema:
        """The schema of a property."""
        if name in form.properties:
            return form.properties[name]
        return self._by_patterns(form.by_pattern, name) or form.others

    def _both(self, one: Form, other: Form, at: str) -> Form:
        """What both forms ask for."""
        if one == _ANY or other == _ANY:
            return other if one == _ANY else one
        if one.by_pattern and other.by_pattern and (one.others or other.others):
            raise GrammarError(
                f"json_schema at {at}: 'patternProperties' of several schemas is not supported"
            )
        values = one.values if other.values is None else other.values
        if one.values is not None and other.values is not None:
            values = {key: value for key, value in one.values.items() if key in other.values}
        count = max(len(one.first), len(other.first))
        return Form(
            kinds=one.kinds & other.kinds,
            told=one.told | other.told,
            values=values,
            excluded={**one.excluded, **other.excluded},
            low=closest([each for each in (one.low, other.low) if each], max),
            high=closest([each for each in (one.high, other.high) if each], min),
            multiples=(*one.multiples, *other.multiples),
            least=_merged(one.least, other.least, max),
            most=_merged(one.most, other.most, min),
            patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
            formats=tuple(dict.fromkeys((*one.formats, *other.formats))),
            unmatched=(*one.unmatched, *other.unmatched),
            properties={
                name: _once(self.of_property(one, name) + self.of_property(other, name))
                for name in {**one.properties, **other.properties}
            },
            by_pattern={
                pattern: _once(
                    schema
                    + (other if pattern in one.by_pattern else one).by_pattern.get(pattern, ())
                    + (other if pattern in one.by_pattern else one).others
                )
                for pattern, schema in {**other.by_pattern, **one.by_pattern}.items()
            },
            others=_once(one.others + other.others),
            required=tuple(dict.fromkeys((*one.required, *other.required))),
            names=_once(one.names + other.names),
            first=tuple(_once(one.item(index) + other.item(index)) for index in range(count)),
            rest=_once(one.rest + other.rest),
            is_unique=one.is_unique or other.is_unique,
            refused={**one.refused, **other.refused},
        )

    def _found(self, name: Any, part: Part, at: str) -> Part | None:
        """The schema that a reference in a part names; None where it has been in itself as often as it may.

        Raises:
          GrammarError: there is none.
          Recursion: it refers to itself, which was not known.
        """
        if not isinstance(name, str):
            raise GrammarError(f"json_schema at {at}: $ref must name a part of the schema, got {name!r}")
        base, fragment = _joined(part.base, name)
        found, place = self._resources.get(base), f"{base}#{fragment}"
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
        else:
            for index, written in enumerate(fragment.split("/")[1:]):
                base = self._address(found, base)[0] if index else base
                key = unquote(written).replace("~1", "/").replace("~0", "~")
                if isinstance(found, list):
                    found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
                else:
                    found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            raise GrammarError(f"json_schema at {at}: $ref must name a part of the schema, got {name!r}")
        if place in self._recursive:
            is_over = part.entered.count(place) >= self._recursive[place]
            return None if is_over else Part(found, base, entered=(*part.entered, place))
        if place in part.path:
            raise Recursion(place)
        return Part(found, base, part.path | {place}, part.entered)

    def _implied(self, asked: Mapping[str, Any], part: Part, at: str) -> Iterator[list[Part]]:
        """What `not`, `if` and dependencies say, each as parts one of which a value must fit."""
        inner: Callable[[Any], Part] = lambda schema: replace(part, schema=schema)  # noqa: E731
        if "not" in asked:
            yield self._not(inner(asked["not"]), at)
        if "if" in asked and asked.keys() & {"then", "else"}:
            condition, otherwise = asked["if"], (inner(asked.get("else", True)),)
            yield [
                inner({"allOf": [condition, asked.get("then", True)]}),
                *(
                    inner(form)
                    for each in self._not(inner(condition), at)
                    for form in self.read((each, *otherwise), at)
                ),
            ]
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            for key, needed in _mapping(asked, name, at).items():
                yield [
                    inner(Form(properties={key: NEVER})),
                    inner({"required": needed} if isinstance(needed, list) else needed),
                ]

    def _not(self, part: Part, at: str) -> list[Part]:
        """Parts that together have the values which do not fit one."""
        schema = part.schema
        if isinstance(schema, bool):
            return [] if schema else [replace(part, schema=True)]
        if not isinstance(schema, Mapping):
            raise GrammarError(f"json_schema at {at}: must be an object or true, got {schema!r}")
        part = replace(part, base=self._address(schema, part.base)[0])
        inner: Callable[[Any], Part] = lambda schema: replace(part, schema=schema)  # noqa: E731
        parts: list[Part] = []
        for name, given in schema.items():
            if name not in _KEYWORDS or (given is None and name != "const"):
                continue
            if name == "type":
                parts.append(inner(Form(kinds=KINDS - _kinds(given, at))))
            elif name in ("enum", "const"):
                parts.append(inner(Form(excluded=_values({name: given}, at) or {})))
            elif name == "required" and isinstance(given, list):
                parts += [inner(Form(kinds=_OBJECT, properties={each: NEVER})) for each in given]
            elif name == "properties":
                parts += [
                    inner(Form(kinds=_OBJECT, required=(each,), properties={each: (inner({"not": of_it}),)}))
                    for each, of_it in _mapping(schema, name, at).items()
                ]
            elif name == "not":
                parts.append(inner(given))
            elif name == "allOf":
                parts += [each for of_it in _parts(given, part, at, name) for each in self._not(of_it, at)]
            elif name == "anyOf":
                parts.append(
                    inner({"allOf": [{"not": each.schema} for each in _parts(given, part, at, name)]})
                )
            elif name == "$ref":
                found = self._found(given, part, at)
                parts += [] if found is None else self._not(found, at)
            elif name == "pattern":
                parts.append(inner(Form(kinds=_TYPES["string"], unmatched=_text(schema, name, at))))
            elif name in _BOUNDS:
                low, high = self._bounds({name: given}, at)
                other = [None if bound is None else (bound[0], not bound[1]) for bound in (high, low)]
                parts.append(inner(Form(kinds=_TYPES["number"], low=other[0], high=other[1])))
            elif name[:3] in ("min", "max") and name[3:] in _LENGTHS:
                least, most = _limits({name: given}, at)
                kind = _LENGTHS[name[3:]]
                below = {kind: least[kind] - 1} if least else {}
                above = {kind: most[kind] + 1} if most else {}
                parts.append(inner(Form(kinds=_TYPES[kind], least=above, most=below)))
            else:
                raise GrammarError(f"json_schema at {at}: {name!r} inside of 'not' is not supported")
        return parts

    def _one_of(self, forms: list[Form], branches: list[Part], at: str, is_wide: bool) -> list[Form]:
        """The forms of exactly one branch. Values that fit two of them are left out, if they can be told."""
        each = [self._all(forms, self._of(branch, at, is_wide), at) for branch in branches]
        if is_wide:
            return [form for some in each for form in some]
        wide = [self._of(branch, at, True) for branch in branches]
        kept = []
        for index, some in enumerate(each):
            for form in some:
                for other in (form for i, of_branch in enumerate(wide) if i != index for form in of_branch):
                    form = self._apart(form, other, at)
                if form.kinds and form.values != {}:
                    kept.append(form)
        return kept

    def _apart(self, form: Form, other: Form, at: str) -> Form:
        """The form without values that have the other, too."""
        self._work.count(_MERGE)
        form = replace(form, kinds=form.written)
        if not form.kinds & other.kinds:
            return form
        if form.values is not None:
            left = {k: v for k, v in form.values.items() if not self.fits(v, other, at, True)}
            return replace(form, values=left)
        if self._is_empty(self._both(form, other, at), at, 0):
            return form
        shared = form.kinds & other.kinds
        if shared <= _OBJECT:
            telling = (
                name
                for name in form.properties
                if name not in form.required
                and name in other.properties
                and self._are_apart(form.properties[name], other.properties[name], at, 0)
            )
            if (name := next(telling, None)) is not None:
                return replace(form, required=(*form.required, name))
            missing = sorted(set(other.required) - set(form.required), key=form.properties.__contains__)
            if missing:
                return self._both(form, Form(properties={missing[0]: NEVER}), at)
        if form.kinds > shared:
            return replace(form, kinds=form.kinds - shared)
        raise GrammarError(
            f"json_schema at {at}: a value may fit several schemas of oneOf, which is not supported; "
            "use anyOf"
        )

    def _are_apart(self, one: Schema, other: Schema, at: str, depth: int) -> bool:
        return self.is_empty(one + other, at, depth + 1)

    def is_empty(self, schema: Schema, at: str, depth: int = 0) -> bool:
        """Whether no value fits a schema, as far as that is easily seen."""
        if depth > _COMPARED_DEPTH:
            return False
        try:
            return all(self._is_empty(form, at, depth) for form in self.read(schema, at, is_wide=True))
        except TooLarge:
            raise
        except GrammarError:
            return False

    def _is_empty(self, form: Form, at: str, depth: int) -> bool:
        self._work.count(_MERGE)
        if form.values is not None:
            return not any(self.fits(value, form, at, True) for value in form.values.values())
        return all(self._has_none(form, kind, at, depth) for kind in form.kinds)

    def _has_none(self, form: Form, kind: str, at: str, depth: int) -> bool:
        least, most = form.least.get(kind, 0), form.most.get(kind, math.inf)
        if kind in ("integer", "fraction"):
            low, high = form.low, form.high
            return low is not None and high is not None and (low[0], low[1] or high[1]) > (high[0], False)
        if kind == "array":
            return least > most or any(
                self.is_empty(form.item(i), at, depth + 1) for i in range(min(least, 8))
            )
        if kind == "object":
            needed = (self.of_property(form, name) for name in form.required)
            return max(least, len(form.required)) > most or any(
                self.is_empty(schema, at, depth + 1) for schema in needed if schema
            )
        return least > most

    def fits(self, value: Any, form: Form, at: str, is_wide: bool = False) -> bool:
        """Whether a value has a form. Formats are not asked."""
        self._work.count(_FITTING)
        kind, key = kind_of(value), canonical(value)
        if kind not in form.kinds or key in form.excluded or key not in (form.values or {key: value}):
            return False
        inner: Callable[[Any, Schema], bool] = lambda each, schema: any(  # noqa: E731
            self.fits(each, one, at, is_wide) for one in (self.read(schema, at, is_wide=is_wide))
        )
        if kind in ("integer", "fraction"):
            number = Fraction(str(value))
            return (
                (form.low is None or number > form.low[0] or (number == form.low[0] and not form.low[1]))
                and (
                    form.high is None
                    or number < form.high[0]
                    or (number == form.high[0] and not form.high[1])
                )
                and all((number / each).denominator == 1 for each in form.multiples)
            )
        if kind in ("null", "boolean"):
            return True
        if not form.least.get(kind, 0) <= len(value) <= form.most.get(kind, math.inf):
            return False
        if kind == "string":
            return all(self._matches(pattern, value) for pattern in form.patterns) and not any(
                self._matches(pattern, value) for pattern in form.unmatched
            )
        if kind == "array":
            is_unique = not form.is_unique or len(set(map(canonical, value))) == len(value)
            return is_unique and all(inner(each, form.item(index)) for index, each in enumerate(value))
        return (
            all(name in value for name in form.required)
            and all(inner(name, form.names) for name in value if form.names)
            and all(inner(each, self.of_property(form, name)) for name, each in value.items())
        )


_ANY = Form()


def kind_of(value: Any) -> str:
    """The kind of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(whole_number(value), int) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def written(value: Any, at: str) -> str:
    """A value as JSON.

    Raises:
      GrammarError: it has none, such as half a character.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema at {at}: a value cannot be written as JSON: {error}") from None
    return text


def canonical(value: Any) -> str:
    """A text that is the same for equal values of JSON."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """A value with its whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else whole_number(value)


def _joined(base: str, reference: str) -> tuple[str, str]:
    """The address of a document, and the part of it, that a reference relative to another one names."""
    if reference.startswith("#"):
        return base, reference[1:]
    try:
        address, fragment = urldefrag(urljoin(base, reference))
    except ValueError:
        return reference, ""
    return address, fragment


def _once(schema: Schema) -> Schema:
    """A schema without parts that are there twice."""
    return (
        tuple({(id(part.schema), part.base): part for part in schema}.values()) if len(schema) > 1 else schema
    )


def closest(bounds: list[Bound], closer: Any) -> Bound | None:
    """The closest bound, of equal ones that which leaves the number out."""
    if not bounds:
        return None
    value = closer(bound[0] for bound in bounds)
    return value, any(is_strict for each, is_strict in bounds if each == value)


def _merged(one: Mapping[str, int], other: Mapping[str, int], closer: Any) -> dict[str, int]:
    return {**one, **other} | {name: closer(one[name], other[name]) for name in one.keys() & other.keys()}


def _kinds(given: Any, at: str) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(name in _TYPES for name in map(str, names)):
        raise GrammarError(f"json_schema at {at}: type must be among {', '.join(_TYPES)}, got {given!r}")
    return frozenset[str]().union(*(_TYPES[name] for name in names))


def _values(asked: Mapping[str, Any], at: str) -> dict[str, Any] | None:
    if "enum" not in asked:
        return {canonical(asked["const"]): asked["const"]} if "const" in asked else None
    values = listed(asked["enum"], at, "enum")
    for value in values:
        written(value, at)
    if "const" in asked:
        values = [value for value in values if canonical(value) == canonical(asked["const"])]
    return {canonical(value): value for value in values}


def listed(value: Any, at: str, name: str) -> list[Any]:
    """A list of a schema.

    Raises:
      GrammarError: it is none, or empty.
    """
    if not isinstance(value, list) or not value:
        raise GrammarError(f"json_schema at {at}: {name} must be a list, not empty, got {value!r}")
    return value


def _parts(value: Any, part: Part, at: str, name: str) -> list[Part]:
    return [replace(part, schema=each) for each in listed(value, at, name)]


def _mapping(asked: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    value = asked.get(name, {})
    if not isinstance(value, Mapping):
        raise GrammarError(f"json_schema at {at}: {name} must be an object, got {value!r}")
    return value


def _text(asked: Mapping[str, Any], name: str, at: str) -> tuple[str, ...]:
    if name not in asked:
        return ()
    if not isinstance(asked[name], str):
        raise GrammarError(f"json_schema at {at}: {name} must be a string, got {asked[name]!r}")
    return (asked[name],)


def _multiples(asked: Mapping[str, Any], at: str) -> tuple[Fraction, ...]:
    if "multipleOf" not in asked:
        return ()
    value = whole_number(asked["multipleOf"])
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise GrammarError(f"json_schema at {at}: multipleOf must be a number above 0, got {value!r}")
    return (Fraction(str(value)),)


def _limits(asked: Mapping[str, Any], at: str) -> tuple[dict[str, int], dict[str, int]]:
    """Limits of lengths, by kind."""
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for of_kind, kind in _LENGTHS.items():
        for limits, side in zip(found, ("min", "max"), strict=True):
            if (name := side + of_kind) in asked:
                value = whole_number(asked[name])
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise GrammarError(
                        f"json_schema at {at}: {name} must be an integer, 0 or more, got {value!r}"
                    )
                limits[kind] = value
    return found
