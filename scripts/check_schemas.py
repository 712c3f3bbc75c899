"""Compile every JSON schema of a folder, and check the answers that it allows with the package jsonschema.

    python scripts/check_schemas.py FOLDER [--sample 60] [--samples 5] [--seed 0] [--reasons 15]

A file holds a schema; a mapping with `schema` and `tests`, each with `data` and `valid`, as in maskbench/data
of JSONSchemaBench; or a list of such mappings, as in the official test suite (clone either). --sample takes
so many schemas of each group: the names of files up to `---`, or else their folders. Of each schema that
compiles, random answers are validated, and its tests must be accepted only if they are valid. They are read
as `json.dumps` writes them, so a valid one whose properties are in another order is not accepted. The exit
status is 1 if an answer or an accepted test is invalid.
"""

import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from jaxspec.commands.command_line import Parser
from jaxspec.config import load_config
from jaxspec.files import Tokenizer, open_checkpoint
from jaxspec.grammar import TokenAutomaton, Vocabulary
from jaxspec.grammar.json_schema import json_schema_automaton
from jaxspec.grammar.token_automaton import token_automaton
from jaxspec.sampling.grammar import GrammarError

LONG = 60
"""Tokens after which a random answer takes the shortest way to its end."""


def main(arguments: list[str] | None = None) -> int:
    """Checks a folder; see the module docstring."""
    args = _parse(arguments)
    target = load_config("smollm2-135m").target
    tokenizer = open_checkpoint(target.source, target.file, target.sha256, progress=False).tokenizer
    assert tokenizer is not None
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    results: dict[str, list[Result]] = defaultdict(list)
    for group, cases in sorted(_groups(args.folder).items()):
        for name, schema, tests in _some(cases, args.sample, args.seed):
            result = check(schema, tests, tokenizer, vocabulary, args.samples)
            results[group].append(result)
            for problem in result.invalid:
                print(f"{name}: {problem}", flush=True)
    _print_table(results)
    reasons = Counter(result.reason for rows in results.values() for result in rows if result.reason)
    for reason, count in reasons.most_common(args.reasons):
        print(f"{count:6} {reason}")
    return int(any(result.invalid for rows in results.values() for result in rows))


@dataclass
class Result:
    """What came of a schema.

    Attributes:
      seconds: of processor time, to compile it or to refuse it.
      reason: why it was refused, without places and values; "" if it compiles.
      accepted, valid: valid tests that are accepted, and all.
      invalid: answers and accepted tests that are not valid.
    """

    seconds: float = 0.0
    reason: str = ""
    accepted: int = 0
    valid: int = 0
    invalid: list[str] = field(default_factory=list)


def check(
    schema: Any, tests: list[Any], tokenizer: Tokenizer, vocabulary: Vocabulary, samples: int
) -> Result:
    """Compiles a schema, draws answers, and reads its tests."""
    result, started = Result(), time.process_time()
    try:
        bytes_ = json_schema_automaton(schema)
        automaton = token_automaton(bytes_, vocabulary)
    except (GrammarError, RecursionError) as error:
        result.reason = re.sub(r" at \$.*?: |'[^']*'(?= refers| is required)|\d+", " ", str(error))[:100]
        return result
    finally:
        result.seconds = time.process_time() - started
    validator = validator_of(schema)
    for text in Walks(automaton, vocabulary).texts(tokenizer, samples):
        if not _is_valid(validator, json.loads(text)):
            result.invalid.append(f"the answer {text[:200]} is invalid")
    for test in tests:
        state = 0
        for byte in json.dumps(test["data"], ensure_ascii=False).encode(errors="surrogatepass"):
            state = int(bytes_.next[state, byte]) if state >= 0 else -1
        is_accepted = state >= 0 and bool(bytes_.is_final[state])
        result.valid += test["valid"]
        result.accepted += test["valid"] and is_accepted
        if is_accepted and not test["valid"]:
            result.invalid.append(f"the invalid test {json.dumps(test['data'])[:200]} is accepted")
    return result


def validator_of(schema: Any) -> Any:
    """The validator of a schema's draft, or of the first that it is a schema of; formats are checked."""
    drafts = [jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator]
    named = jsonschema.validators.validator_for(schema, default=None)
    for draft in [named, *drafts] if named else drafts:
        try:
            draft.check_schema(schema)
        except jsonschema.SchemaError:
            continue
        return draft(schema, format_checker=draft.FORMAT_CHECKER)
    return None


def _is_valid(validator: Any, value: Any) -> bool:
    try:
        return validator is None or validator.is_valid(value)
    except (
        Exception
    ) as error:  # of the package: a reference to elsewhere, a pattern that Python does not know
        return "Unresolvable" in type(error).__name__ or isinstance(error, re.error)


class Walks:
    """Random texts that an automaton accepts.

    Tokens are drawn by class, so that rare ones come too; a long text takes the shortest way to its end.
    """

    def __init__(self, automaton: TokenAutomaton, vocabulary: Vocabulary, seed: int = 0):
        self._automaton, self._end = automaton, int(automaton.classes[vocabulary.ends[0]])
        self._rng = np.random.default_rng(seed)
        sizes = np.bincount(automaton.classes, minlength=automaton.next.shape[1])
        self._tokens = np.split(np.argsort(automaton.classes, kind="stable"), np.cumsum(sizes)[:-1])
        self._left = self._distances()

    def _distances(self) -> np.ndarray:
        """The least tokens to an end of each state."""
        table, far = self._automaton.next, 1 << 20
        left = np.where(table[:, self._end] >= 0, 1, far)
        while True:
            shorter = np.minimum(left, np.where(table >= 0, left[table] + 1, far).min(axis=1))
            if (shorter == left).all():
                return left
            left = shorter

    def tokens(self) -> list[int]:
        """Tokens of a text, with one that ends it."""
        table, state, tokens = self._automaton.next, 0, list[int]()
        while True:
            classes = np.flatnonzero(table[state] >= 0)
            assert len(classes), "a text that cannot end"
            if len(tokens) > LONG:
                left = np.where(classes == self._end, 0, self._left[table[state, classes]])
                classes = classes[[left.argmin()]]
            kind = self._rng.choice(classes)
            tokens.append(int(self._rng.choice(self._tokens[kind])))
            if kind == self._end:
                return tokens
            state = int(table[state, kind])

    def texts(self, tokenizer: Tokenizer, count: int) -> Iterator[str]:
        """Texts, decoded by the tokenizer."""
        for _ in range(count):
            yield tokenizer.decode(self.tokens())


Case = tuple[str, Any, list[Any]]


def _groups(folder: Path) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        group = path.name.partition("---")[0] if "---" in path.name else path.parent.name
        name = str(path.relative_to(folder))
        if isinstance(content, list):
            groups[group] += [
                (f"{name}: {each['description']}", each["schema"], each["tests"]) for each in content
            ]
        elif isinstance(content, dict) and isinstance(content.get("tests"), list):
            groups[group].append((name, content["schema"], content["tests"]))
        else:
            groups[group].append((name, content, []))
    return groups


def _some(cases: list[Case], count: int | None, seed: int) -> list[Case]:
    return cases if count is None or count >= len(cases) else random.Random(seed).sample(cases, count)


def _print_table(results: dict[str, list[Result]]) -> None:
    print("| schemas of | all | compile | share | median s | most s | valid tests accepted | invalid |")
    print("|---|---|---|---|---|---|---|---|")
    total = [result for rows in results.values() for result in rows]
    for group, rows in [*results.items(), ("all", total)]:
        compiled = [row for row in rows if not row.reason]
        seconds = sorted(row.seconds for row in rows)
        accepted = f"{sum(row.accepted for row in rows)} of {sum(row.valid for row in compiled)}"
        print(
            f"| {group} | {len(rows)} | {len(compiled)} | {len(compiled) / len(rows):.0%} "
            f"| {seconds[len(seconds) // 2]:.2f} | {seconds[-1]:.2f} | {accepted} "
            f"| {sum(bool(row.invalid) for row in rows)} |"
        )


def _parse(arguments: list[str] | None) -> Any:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, help="schemas of each group (all)")
    parser.add_argument("--samples", type=int, default=5, help="answers of each schema (5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasons", type=int, default=15, help="reasons of refusal to print (15)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
