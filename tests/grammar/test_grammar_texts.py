"""Random texts of every kind of grammar are valid, and what is not allowed would have made them invalid."""

import datetime
import json
import re
import time
import tracemalloc
from itertools import product
from string import ascii_lowercase
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from check_schemas import Walks
from grammar_vocabularies import NAMES, large_vocabulary, tokenizer, vocabulary
from grammars import KEYWORDS, NO_KEYWORDS, REGEXES, SCHEMAS

from jaxspec.grammar import Vocabulary, byte_automaton, compile_grammar
from jaxspec.sampling.grammar import Grammar, GrammarError

FORMATS = {
    "date-time": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "uuid": UUID,
}
SAMPLES = 20


def texts(grammar, name, samples=SAMPLES):
    tokens, words = tokenizer(name), vocabulary(name)
    automaton = compile_grammar(grammar, words)
    walks = Walks(automaton, words)
    for _ in range(samples):
        drawn = walks.tokens()
        assert not set(drawn[:-1]) & set(tokens.special_token_ids.values())
        assert automaton.run(drawn) >= 0
        yield tokens.decode(drawn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("regex", REGEXES)
def test_texts_of_a_regular_expression_match_it(regex, name):
    for text in texts(Grammar.of_regex(regex), name):
        assert re.fullmatch(regex, text), text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_texts_of_a_schema_are_valid(schema, name):
    draft = jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    for text in texts(Grammar.of_json_schema(schema), name):
        value = json.loads(text)
        validator.validate(value)
        FORMATS.get(schema.get("format"), str)(value)
        assert re.search(schema.get("pattern", ""), str(value), re.ASCII), "ECMA-262 knows letters of ASCII"
        assert json.loads(json.dumps(value)) == value


def test_null_asks_for_nothing_but_the_value_null():
    """As programs write schemas whose fields have no value."""
    nothing = dict.fromkeys([*KEYWORDS, "uniqueItems", "not", "no such keyword"])
    del nothing["const"]
    for schema in ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, {"const": None}, _TEXT):
        words = vocabulary("bytes")
        full = compile_grammar(Grammar.of_json_schema({**nothing, **schema}), words)
        bare = compile_grammar(Grammar.of_json_schema(schema), words)
        assert np.array_equal(full.next, bare.next)
    assert list(texts(Grammar.of_json_schema({"const": None, "enum": None}), "bytes", 1)) == ["null"]


_TEXT = {"type": "string", "maxLength": 3}


def keywords_of(value):
    """The names in a schema, of keywords and of properties."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return {
        *(value if isinstance(value, dict) else ()),
        *(name for part in parts for name in keywords_of(part)),
    }


def test_every_keyword_is_among_the_schemas():
    assert set(KEYWORDS) <= keywords_of(SCHEMAS)
    assert len(REGEXES) + len(SCHEMAS) >= 100


@pytest.mark.parametrize(
    ("kind", "keyword"), [(kind, keyword) for kind, keywords in NO_KEYWORDS.items() for keyword in keywords]
)
def test_other_keywords_are_refused_by_name(kind, keyword):
    """Beside a type, below a property, and alone."""
    asked = {keyword: NO_KEYWORDS[kind][keyword]}
    typed = {"type": kind, **asked}
    for schema in (typed, {"type": "object", "properties": {"a": typed}, "required": ["a"]}, asked):
        with pytest.raises(GrammarError) as error:
            compile_grammar(Grammar.of_json_schema(schema), vocabulary("bytes"))
        assert repr(keyword) in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_one_of_its_texts(name):
    choice = ["yes", "no", "a [literal] text. (*)", " spaced ", "é😀", "yes, but"]
    assert set(texts(Grammar.of_choice(choice), name, 200)) == set(choice)


LETTERS = "abc"
TOKENS = ["a", "b", "c", "ab", "ba", "bc", "abc", "cc", "aab", "bcb", "a"]


@pytest.mark.parametrize(
    "regex",
    [
        "a*b",
        "(ab|ba)*c",
        "a{2,3}(b|c)?",
        "[^a]+a?",
        "(a|b)*abb",
        "abc|ab|b",
        "((a|b)c){1,2}",
        ".b?.",
        "a?b?c?",
    ],
)
def test_a_token_is_allowed_exactly_if_a_match_can_follow(regex):
    """Against all texts of three letters that `re` matches: every beginning of up to four, every token."""
    longest = 8
    beginnings = set()
    for size in range(longest + 1):
        for letters in product(LETTERS, repeat=size):
            text = "".join(letters)
            if re.fullmatch(regex, text):
                beginnings |= {text[:i] for i in range(size + 1)}
    end = len(TOKENS)
    words = Vocabulary(
        end + 3, {i: each.encode() for i, each in enumerate(TOKENS)}, (end,), False, lambda text: []
    )
    automaton = compile_grammar(Grammar.of_regex(regex), words)
    waiting, seen = [("", 0)], {("", 0)}
    while waiting:
        text, state = waiting.pop()
        allowed = automaton.allowed(state)
        assert allowed[end] == bool(re.fullmatch(regex, text))
        assert not allowed[end + 1 :].any()
        for token, piece in enumerate(TOKENS):
            assert allowed[token] == (text + piece in beginnings), (text, piece)
            after = (text + piece, int(automaton.next[state, automaton.classes[token]]))
            if allowed[token] and len(after[0]) <= longest - 4 and after not in seen:
                seen.add(after)
                waiting.append(after)
    assert len(seen) > 3


def without_a_choice(automaton):
    """The tokens from the first state on that have no alternative."""
    state, tokens = 0, []
    while automaton.forced[state] >= 0:
        tokens.append(int(automaton.forced[state]))
        state = int(automaton.next[state, automaton.classes[tokens[-1]]])
    return tokens, state


@pytest.mark.parametrize(
    ("kind", "is_settled"), [({"type": "string"}, True), ({"type": "integer"}, False), ({"minimum": 0}, True)]
)
def test_what_must_follow_is_spelled_as_the_tokenizer_does(kind, is_settled):
    """Up to the space before a number that may be negative, since a space and a minus are one token."""
    schema = {"type": "object", "properties": {"name": {"type": "integer", **kind}}, "required": ["name"]}
    words = vocabulary("smollm2")
    automaton = compile_grammar(Grammar.of_json_schema(schema), words)
    tokens, state = without_a_choice(automaton)
    spelled = list(words.encode('{"name": "' if kind.get("type") == "string" else '{"name": '))
    assert tokens == (spelled if is_settled else spelled[:-1])
    assert automaton.allowed(state)[words.encode("3" if is_settled else " -")].all()


def test_a_whole_text_without_a_choice_is_spelled_to_its_end():
    words, text = vocabulary("smollm2"), "the only text"
    automaton = compile_grammar(Grammar.of_choice([text]), words)
    tokens, state = without_a_choice(automaton)
    assert tokens == list(words.encode(text))
    assert np.flatnonzero(automaton.allowed(state)).tolist() == sorted(words.ends)


DEEP = {
    "type": "object",
    "properties": {f"x{i}": {"$ref": "#/$defs/a"} for i in range(40)},
    "required": [f"x{i}" for i in range(40)],
}
_LISTS = {"type": "object", "properties": {f"p{i}": {"$ref": f"#/$defs/a/$defs/n{i}"} for i in range(1500)}}
_LISTS["$defs"] = {
    f"n{i}": {"type": "array", "items": {"$ref": f"#/$defs/a/$defs/n{i}"}} for i in range(1500)
}
REFUSED = [
    ("regex", r"(a", "regex '(a': missing )"),
    ("regex", r"(?<=a)b", "looks ahead or back"),
    ("regex", r"(a(?=b))b", "looks ahead or back"),
    ("regex", r"a(?=b)", "no text has all"),
    ("regex", r"(a)\1", "refers back to a group"),
    ("regex", r"a\bc", "an anchor inside"),
    ("regex", r"(?>a)b", "an atomic group"),
    ("regex", r"a*+", "a possessive repetition"),
    ("regex", r"[^\s\S]", "no character that is possible"),
    ("regex", "[[a]b]", "regex '[[a]b]': Possible nested set"),  # an error where warnings are
    ("regex", "(" * 5000 + ")" * 5000, "nested too deeply"),
    ("regex", r"(a|b)*a(a|b){14}", "more than"),
    ("regex", r"((a{1000}){1000}){1000}", "too large"),
    ("regex", r"\w{1,2000}", "too large"),
    ("regex", r"(.{0,30}a){20}", "too large"),
    ("regex", r"(a?){3000}a{3000}", "too large"),
    ("regex", "|".join("a" * i for i in range(1, 700)), "too large"),
    ("regex", "".join(rf"[\w{chr(0x2000 + i)}]" for i in range(1600)), "too large"),
    ("regex", "(?i)" + "".join(rf"[\w{chr(0x2000 + i)}]" for i in range(100)), "too large"),
    ("regex", "abc" * 50_000, "too large"),
    ("regex", "|".join(f"{a}{b}[^{a}]*" for a in ascii_lowercase for b in ascii_lowercase), "too large"),
    ("json_schema", {"oneOf": [{"enum": [f"{i} {j}" for j in range(20)]} for i in range(800)]}, "too large"),
    ("json_schema", {"$defs": {"a": DEEP}, "oneOf": [{"$ref": "#/$defs/a"}] * 2}, "may fit several schemas"),
    ("json_schema", {"$defs": {"a": DEEP}, "$ref": "#/$defs/a"}, "no value has all"),
    (
        "json_schema",
        {
            "$defs": {"a": {"type": "string", "pattern": "a{3}b|" * 3000 + "c"}},
            "type": "object",
            "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(3000)},
        },
        "too large",
    ),
    ("json_schema", {"type": "string", "pattern": r"\p{L}" * 20_000}, "too large"),
    ("json_schema", {"$defs": {"a": _LISTS}, "$ref": "#/$defs/a"}, "too large"),
    ("json_schema", {"type": "object", "properties": {"a": 3}}, "$.a: must be an object or true"),
    ("json_schema", {"type": "text"}, "type must be among"),
    ("json_schema", {"type": "number", "minimum": "3"}, "minimum must be a number"),
    ("json_schema", {"type": "number", "minimum": 3, "maximum": 2}, "no number is at least 3"),
    ("json_schema", {"type": "number", "multipleOf": 0.1}, "'multipleOf' with a fraction"),
    ("json_schema", {"type": "integer", "multipleOf": 0}, "multipleOf must be a number above 0"),
    ("json_schema", {"type": "string", "maxLength": 2.5}, "maxLength must be an integer, 0 or more"),
    ("json_schema", {"oneOf": [{"const": 1}, {"const": 1.0}]}, "no value has all"),
    ("json_schema", {"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "may fit several schemas"),
    ("json_schema", {"oneOf": [{"properties": {"a": {}}}, {"type": "null"}]}, "may fit several schemas"),
    ("json_schema", {"oneOf": [{"required": 3}, {"type": "null"}]}, "required must be a list of names"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, "no integer is at least 5"),
    ("json_schema", {"type": "string", "maxLength": 2, "pattern": "^aaa"}, "no text has all"),
    ("json_schema", {"type": "string", "pattern": '"'}, "no character that is possible here"),
    ("json_schema", {"type": "string", "pattern": "(?<!a)b"}, "looks ahead"),
    ("json_schema", {"type": "string", "format": "regex"}, "format 'regex' is not supported"),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is above maxLength 2"),
    ("json_schema", {"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems'"),
    (
        "json_schema",
        {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2, "items": False},
        "at least 2 and at most 1",
    ),
    (
        "json_schema",
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "$.a: no value has all",
    ),
    ("json_schema", {"not": {}}, "no value has all"),
    ("json_schema", {"not": {"uniqueItems": True}}, "'uniqueItems' inside of 'not' is not supported"),
    ("json_schema", {"type": "string", "pattern": r"\Aa"}, "'\\\\A' is not supported"),
    ("json_schema", {"type": "string", "pattern": "[]"}, "a class without a character"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may fit several schemas"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "null"}]}, "no value has all"),
    ("json_schema", {"enum": []}, "enum must be a list"),
    ("json_schema", {"type": "string", "enum": [1]}, "no value of 'enum' has the type"),
    ("json_schema", {"$ref": "#/$defs/x"}, "$ref must name a part of the schema"),
    ("json_schema", {"$ref": "https://x.org/y"}, "$ref must name a part of the schema"),
    ("json_schema", {"$ref": "#"}, "no value has all"),
    (
        "json_schema",
        {
            "$ref": "#/$defs/n0",
            "$defs": {
                f"n{i}": {
                    "type": "array",
                    "prefixItems": [{"$ref": f"#/$defs/n{i + 1}"}] * 10,
                    "items": False,
                }
                for i in range(20)
            }
            | {"n20": {"type": "null"}},
        },
        "nested too deeply",
    ),
]


@pytest.mark.parametrize(
    ("kind", "source", "problem"), REFUSED, ids=[f"{k}-{i}" for i, (k, *_) in enumerate(REFUSED)]
)
def test_what_cannot_be_is_refused_in_one_line(kind, source, problem):
    make = {"regex": Grammar.of_regex, "json_schema": Grammar.of_json_schema}[kind]
    with pytest.raises(GrammarError) as error:
        compile_grammar(make(source), vocabulary("smollm2"))
    assert problem in str(error.value)
    assert str(error.value).startswith(kind)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


EXPLODING = [(kind, source) for kind, source, problem in REFUSED if problem in ("too large", "more than")]


@pytest.mark.parametrize(
    ("kind", "source"), EXPLODING, ids=[f"{k}-{i}" for i, (k, _) in enumerate(EXPLODING)]
)
def test_what_explodes_is_refused_in_a_second_and_200_megabytes(kind, source):
    make = {"regex": Grammar.of_regex, "json_schema": Grammar.of_json_schema}[kind]
    words = vocabulary("smollm2")

    def refuse():
        with pytest.raises(GrammarError):
            compile_grammar(make(source), words)

    started = time.thread_time()
    refuse()
    assert time.thread_time() - started < 2  # a second, on a machine that is half as fast
    tracemalloc.start()
    try:
        refuse()
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


LETTERS_OF_MANY = [chr(0x4E00 + i) for i in range(20_000)]
MANY = {
    "classes": "".join(f"[^{''.join(LETTERS_OF_MANY[i : i + 60 : 10])}]" for i in range(3000)),
    "characters": "".join(f"{''.join(LETTERS_OF_MANY[i : i + 2])}|" for i in range(0, 20_000, 2)),
}


@pytest.mark.parametrize("kind", MANY)
def test_different_characters_count_as_what_they_cost(kind, monkeypatch):
    """Their spelling in UTF-8 takes longer than their nodes; a single character's does not."""
    found = []
    sequences = byte_automaton.utf8_sequences
    monkeypatch.setattr(byte_automaton, "utf8_sequences", lambda chars: found.append(0) or sequences(chars))
    with pytest.raises(GrammarError, match="too large"):
        compile_grammar(Grammar.of_regex(MANY[kind]), vocabulary("bytes"))
    assert len(found) < 1500


def test_a_table_that_will_be_too_large_is_refused_when_its_states_are_known():
    drawn = np.random.default_rng(0).integers(0, 26, (1500, 10))
    words = "|".join("".join(ascii_lowercase[letter] for letter in word) for word in drawn)
    with pytest.raises(GrammarError, match=r"1\d{4} states for \d{3} kinds of tokens take more than"):
        compile_grammar(Grammar.of_regex(f"(?i)({words})"), vocabulary("smollm2"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 100}}, "required": ["a"]},
        {"type": "array", "maxItems": 5},
    ],
    ids=["free values", "a bounded string", "free items"],
)
def test_what_takes_long_but_does_not_explode_is_compiled(schema):
    words = large_vocabulary()
    assert words.size > 150_000
    grammar = Grammar.of_json_schema(schema)
    automaton = compile_grammar(grammar, words)
    few = compile_grammar(grammar, vocabulary("smollm2"))
    for value in ({"a": "b, c", "b": [1, {"c": None}]}, {"a": "é"}, [True, {"a": ["b"]}], [{}] * 6):
        tokens = [*words.encode(json.dumps(value, ensure_ascii=False)), words.ends[0]]
        assert (automaton.run(tokens) < 0) == (few.run(tokens) < 0)
    assert automaton.run([*words.encode("[1, 2"), words.ends[0]]) < 0
