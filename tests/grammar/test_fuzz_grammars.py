"""Whatever a grammar says, it is compiled or refused in one line that names the cause."""

import copy
import json

import numpy as np
import pytest
from grammar_vocabularies import vocabulary
from grammars import REGEXES, SCHEMAS

from jaxspec.grammar import compile_grammar
from jaxspec.sampling.grammar import Grammar, GrammarError

ODD = [
    None,
    True,
    0,
    -1,
    2.5,
    10**30,
    float("nan"),
    "",
    "x",
    "integer",
    [],
    {},
    ["a"],
    [[]],
    [1, "a"],
    {"a": 1},
]


def damaged(value, rng):
    """A copy in which one part is something else, is missing, or is there under another name."""
    value = copy.deepcopy(value)
    parent, key = None, None
    part = value
    while isinstance(part, dict | list) and part and (parent is None or rng.random() < 0.7):
        keys = sorted(part) if isinstance(part, dict) else range(len(part))
        parent, key = part, keys[rng.integers(len(keys))]
        part = part[key]
    odd = copy.deepcopy(ODD[rng.integers(len(ODD))])
    if isinstance(parent, dict) and rng.random() < 0.3:
        names = [name for schema in SCHEMAS for name in schema]
        parent[names[rng.integers(len(names))]] = parent.pop(key)
    elif parent is not None:
        parent[key] = odd
    return value


def compile_or_refuse(make, source):
    try:
        automaton = compile_grammar(make(source), vocabulary("bytes"))
    except GrammarError:  # always of one line
        return False
    return len(automaton.next) > 0


@pytest.mark.parametrize("seed", range(3))
def test_damaged_schemas(seed):
    rng = np.random.default_rng(seed)
    schemas = [damaged(SCHEMAS[rng.integers(len(SCHEMAS))], rng) for _ in range(80)]
    compiled = [compile_or_refuse(Grammar.of_json_schema, json.dumps(schema)) for schema in schemas]
    assert 5 < sum(compiled) < 75


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # Python's, of sets in sets
@pytest.mark.parametrize("seed", range(3))
def test_damaged_patterns(seed):
    rng = np.random.default_rng(seed)
    compiled = []
    for _ in range(80):
        letters = list(REGEXES[rng.integers(len(REGEXES))])
        for _ in range(rng.integers(1, 4)):
            letters.insert(rng.integers(len(letters) + 1), rng.choice(list("()[]{}*+?|^$\\.-,0a")))
        compiled.append(compile_or_refuse(Grammar.of_regex, "".join(letters)))
    assert 5 < sum(compiled) < 78
