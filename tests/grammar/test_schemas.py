"""Which values a schema's automaton accepts, and random schemas against the package jsonschema."""

import json
import re
import warnings

import jsonschema
import numpy as np
import pytest
from check_schemas import Walks, main
from grammar_vocabularies import tokenizer, vocabulary

from jaxspec.grammar import compile_grammar
from jaxspec.sampling.grammar import Grammar, GrammarError

FLAGS = {name: {"type": "boolean"} for name in "ab"}


def accepts(schema, values):
    words = vocabulary("bytes")
    automaton = compile_grammar(Grammar.of_json_schema(schema), words)
    texts = (json.dumps(value, ensure_ascii=False) for value in values)
    return [automaton.run([*words.encode(text), words.ends[0]]) >= 0 for text in texts]


RIGHT = {
    "oneOf of branches without a type": (
        {"type": "object", "properties": FLAGS, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": True}, {"b": True}],
        [{}, {"a": True, "b": True}],
    ),
    "oneOf whose branches tell what they are by a property that may be missing": (
        {"oneOf": [{"properties": {"k": {"const": kind}, kind: {"type": "null"}}} for kind in "ab"]},
        [{"k": "a", "a": None}, {"k": "b"}],
        [{}, {"a": None}, {"k": "b", "a": None}],
    ),
    "oneOf with a type that both branches have": (
        {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]},
        ["a", 1],
        [None, True],
    ),
    "oneOf of numbers and integers": (
        {"oneOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 2}]},
        [2, 3, 3.5],
        [2.5],
    ),
    "equal values in other spellings": (
        {"oneOf": [{"enum": [1, {"a": 1, "b": 2}]}, {"enum": [1.0, {"b": 2, "a": 1.0}, 3]}]},
        [3],
        [1, 1.0, {"a": 1, "b": 2}, {"b": 2, "a": 1.0}],
    ),
    "equal values of allOf": ({"allOf": [{"enum": [1.0, "a"]}, {"const": 1}]}, [1.0], ["a"]),
    "$ref below $id": (
        {
            "$id": "http://x.org/root",
            "$defs": {"n": {"type": "null"}},
            "properties": {
                "in": {"$id": "in", "$defs": {"n": {"type": "boolean"}}, "$ref": "#/$defs/n"},
                "out": {"$ref": "#/$defs/n"},
                "named": {"$ref": "in#/$defs/n"},
                "anchor": {"$ref": "#here"},
                "more": {"$anchor": "here", "const": 1},
            },
            "required": ["in", "out", "named", "anchor"],
        },
        [{"in": True, "out": None, "named": False, "anchor": 1}],
        [{"in": None, "out": None, "named": True, "anchor": 1}],
    ),
    "id of draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://x.org/s#",
            "properties": {"id": {"id": "#n", "type": "null"}, "p": {"$ref": "s#n"}},
            "required": ["id", "p"],
        },
        [{"id": None, "p": None}],
        [{"id": 1, "p": None}],
    ),
    "null": ({"type": "integer", "minimum": None}, [-1, 1], [1.5]),
    "a name of many dots": (
        {"properties": {"." * 33: {"type": "null"}}, "required": ["." * 33]},
        [{"." * 33: None}],
        [{}],
    ),
    "a name that is required twice": (
        {"properties": FLAGS, "required": ["a", "a"], "minProperties": 2, "type": "object"},
        [{"a": True, "b": True}],
        [{"a": True}],
    ),
    "required as in draft 3": (
        {"properties": {"a": {"type": "null", "required": True}}, "type": "object"},
        [{"a": None}],
        [{}],
    ),
    "additional properties of another part of allOf": (
        {"allOf": [{"properties": FLAGS, "additionalProperties": False}, {"properties": {"c": {}}}]},
        [{"a": True}],
        [{"a": True, "c": 1}],
    ),
    "bounds below a float's precision": (
        {"type": "number", "exclusiveMaximum": 1, "exclusiveMinimum": 0},
        [0.5, 0.001],
        [0, 1, 0.0, 1.0],
    ),
    "large integers": (
        {"type": "integer", "minimum": 10**18, "maximum": 10**30},
        [10**18, 10**30],
        [10**18 - 1],
    ),
    "a multiple": ({"type": "integer", "multipleOf": 7, "maximum": 30}, [28, 0, -7], [27, 35]),
    "int32": ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31]),
    "a recursive schema": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        [[], [[], []]],
        [[1], [[[]]]],
    ),
    "unique items": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "maxItems": 2},
        [[], ["a", "c"]],
        [["a", "a"], ["a", "b", "c"]],
    ),
    "an excluded text, however it is written": (
        {"type": "string", "not": {"const": "a/b"}, "maxLength": 3},
        ["a/c"],
        ["a/b"],
    ),
    "a name, however it is written": (
        {
            "type": "object",
            "propertyNames": {"not": {"const": "a"}},
            "additionalProperties": {"type": "null"},
        },
        [{"b": None}],
        [{"a": None}],
    ),
    "unknown words": (
        {"type": "null", "links": [], "_format": 3, "id": 4, "x-a": {}, "nullable": True},
        [None],
        [1],
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_which_values_are_accepted(case):
    schema, right, wrong = RIGHT[case]
    assert accepts(schema, right) == [True] * len(right)
    assert accepts(schema, wrong) == [False] * len(wrong)


def test_an_excluded_text_may_not_be_spelled_with_a_backslash():
    words = vocabulary("bytes")
    automaton = compile_grammar(Grammar.of_json_schema({"type": "string", "not": {"const": "a/b"}}), words)
    assert automaton.run([*words.encode('"a\\/b"'), words.ends[0]]) < 0
    assert automaton.run([*words.encode('"a\\/c"'), words.ends[0]]) >= 0


PATTERNS = [
    ("a{,2}", ["a{,2}"], ["", "aa"]),  # of Python: up to two
    ("^[^]b$", ["xb", "\u2028b"], ["b"]),
    ("^a.b$", ["axb"], ["a\u2028b"]),
    (r"^\u{1F600}$", ["😀"], ["u"]),
    (r"^\ud83d\ude00$", ["😀"], ["u"]),
    (r"^\p{Lu}+$", ["ÄB"], ["äB"]),
    (r"^[\p{Lu}-]\P{Lu}$", ["-a", "Ba"], ["aa", "BB"]),
    (r"^[\w-.]+$", ["a-b."], ["a b"]),
    (r"^(?<year>\d{4})$", ["1999"], ["199"]),
    (r"^[[&&a||b]+$", ["[&|a"], ["]"]),
    ("^a", ["a", "abc"], ["ba"]),
    ("b$", ["b", "aab"], ["ba"]),
    ("^(a$|b)", ["a", "bcd"], ["ab", "cb"]),
    ("^a|b$", ["ax", "xb"], ["xa"]),
    ("^(?!no|x$)[a-z]{1,3}$", ["yes", "on", "xx"], ["no", "nor", "x"]),
    ("^(?!a)", ["b", "", "ba"], ["a", "ab"]),
    (r"^(?=.*\d)[a-z\d]{2}$", ["a1", "11"], ["aa"]),
    (r"^\s\S$", [" a"], ["a ", "  "]),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), PATTERNS, ids=[pattern for pattern, *_ in PATTERNS])
def test_patterns_are_those_of_ecmascript(pattern, right, wrong):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accepts({"type": "string", "pattern": pattern}, right) == [True] * len(right)
        assert accepts({"type": "string", "pattern": pattern}, wrong) == [False] * len(wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"minLength": 3}, {"maximum": 5}, {"maxLength": 4}]},
        {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}]},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"not": {"multipleOf": 2}},
        {"type": "object", "if": {"contains": {}}, "else": {}},
    ],
    ids=str,
)
def test_what_cannot_be_told_apart_is_refused(schema):
    with pytest.raises(GrammarError, match="not supported"):
        accepts(schema, [])


SCALARS = [None, True, False, 0, 1, 1.0, -2, 2.5, "", "a", "ab", "b1", [], {}, [1], {"a": 1}]


def random_schema(rng, depth=2):
    """A schema of keywords of every kind, several of them beside each other."""
    pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
    inner = lambda: random_schema(rng, depth - 1) if depth and rng.random() < 0.7 else pick([True, {}, False])  # noqa: E731
    some = lambda: [inner() for _ in range(rng.integers(1, 4))]  # noqa: E731
    names = lambda: [str(name) for name in rng.choice(list("abc"), rng.integers(0, 3), False)]  # noqa: E731
    made = {
        "type": lambda: pick(
            ["null", "integer", "number", "string", "array", "object", ["boolean", "object"]]
        ),
        "enum": lambda: [pick(SCALARS) for _ in range(rng.integers(1, 6))],
        "const": lambda: pick(SCALARS),
        "properties": lambda: {name: inner() for name in "abc"[: rng.integers(1, 4)]},
        "required": names,
        "additionalProperties": inner,
        "patternProperties": lambda: {pick(["^a", "b$", "."]): inner()},
        "propertyNames": lambda: {"pattern": pick(["^a", "b$", "."])},
        "minProperties": lambda: int(rng.integers(3)),
        "maxProperties": lambda: int(rng.integers(3)),
        "items": inner,
        "prefixItems": some,
        "minItems": lambda: int(rng.integers(3)),
        "maxItems": lambda: int(rng.integers(3)),
        "uniqueItems": lambda: True,
        "minLength": lambda: int(rng.integers(4)),
        "maxLength": lambda: int(rng.integers(4)),
        "pattern": lambda: pick(["^a", "b$", "^[a-c]+$", r"\d", "^(?!a)", "a|b"]),
        "minimum": lambda: pick([-3, 0, 0.5, 2]),
        "maximum": lambda: pick([-3, 0, 0.5, 2]),
        "exclusiveMinimum": lambda: pick([-3, 0, 0.5, 2]),
        "exclusiveMaximum": lambda: pick([-3, 0, 0.5, 2]),
        "multipleOf": lambda: pick([1, 2, 3]),
        "anyOf": some,
        "allOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": lambda: {"a": names()},
        "dependentSchemas": lambda: {"a": inner()},
        "unevaluatedProperties": lambda: False,
        "unevaluatedItems": lambda: False,
    }
    chosen = rng.choice(list(made), rng.integers(1, 4), False)
    schema = {str(name): made[str(name)]() for name in chosen}
    return schema if rng.random() < 0.3 else {"type": made["type"](), **schema}


def count_compiled(seeds):
    """Compiles random schemas; every text that is drawn from one must be valid."""
    words, tokens, compiled = vocabulary("bytes"), tokenizer("bytes"), 0
    for seed in seeds:
        schema = random_schema(np.random.default_rng(seed))
        try:
            automaton = compile_grammar(Grammar.of_json_schema(schema), words)
        except GrammarError:
            continue
        compiled += 1
        validator = jsonschema.Draft202012Validator(schema)
        for text in Walks(automaton, words).texts(tokens, 8):
            assert validator.is_valid(json.loads(text)), (seed, schema, text)
    return compiled


def test_texts_of_random_schemas_are_valid():
    assert count_compiled(range(60)) > 15


@pytest.mark.slow
def test_texts_of_many_random_schemas_are_valid():
    assert count_compiled(range(60, 6000)) > 1500


def test_a_folder_of_schemas_is_checked(tmp_path, capsys):
    """A schema, one with tests, and a list of them, in a group each; a wrong test is told."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.json").write_text('{"type": "boolean"}')
    tests = [{"data": 1, "valid": True}, {"data": "x", "valid": False}]
    (tmp_path / "two---a.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    cases = [{"description": "d", "schema": {"contains": {}, "type": "array"}, "tests": []}]
    (tmp_path / "three---a.json").write_text(json.dumps(cases))
    assert main([str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"\| one \| 1 \| 1 \| 100% .*\| 0 of 0 \| 0 \|", table)
    assert re.search(r"\| two \| 1 \| 1 \| 100% .*\| 1 of 1 \| 0 \|", table)
    assert re.search(r"\| three \| 1 \| 0 \| 0% ", table)
    assert "1 json_schema 'contains' is not supported" in table
    tests[0]["valid"] = False
    (tmp_path / "two---a.json").write_text(json.dumps({"schema": {"type": "integer"}, "tests": tests}))
    assert main([str(tmp_path), "--sample", "1", "--samples", "0"]) == 1
    assert "the invalid test 1 is accepted" in capsys.readouterr().out
