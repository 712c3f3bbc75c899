"""Regular expressions in Python's syntax, read by Python's own parser.

The parser is a private module of the standard library. It is the only one that agrees with `re` on what a
pattern means, which is what users test theirs with.
"""

import re

# Private, but its place and its form are the same in every version of Python that this package supports.
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from jaxspec.grammar.characters import (
    EVERY,
    Ranges,
    both_cases,
    complement,
    matching,
    minus,
    ranges,
    single,
)
from jaxspec.grammar.expression import Chain, Chars, Either, Expression, Repeat
from jaxspec.grammar.work import Work
from jaxspec.sampling.grammar import GrammarError

_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_UNSUPPORTED = {
    "ASSERT": "looks ahead or back",
    "ASSERT_NOT": "looks ahead or back",
    "GROUPREF": "refers back to a group",
    "GROUPREF_EXISTS": "refers back to a group",
    "ATOMIC_GROUP": "has an atomic group",
    "POSSESSIVE_REPEAT": "has a possessive repetition",
}


_LETTER, _RANGE, _FOLDED = 8, 7, 16
"""Steps to read a letter of a pattern and a range of a class; code points whose cases are found in one."""
_SHOWN = 80


def regex_expression(
    pattern: str, work: Work, *, without: Ranges = (), is_of_json: bool = False
) -> Expression:
    """The expression of all texts that a pattern matches from their beginning to their end.

    Args:
      pattern: in the syntax of `re`, whatever needs no memory of what was matched.
      work: counts the steps.
      without: characters that the texts must not hold; classes lose them.
      is_of_json: whether the texts must match, too, if \\d, \\w and \\s stand for characters of ASCII alone,
        as JSON Schema has it.

    Raises:
      GrammarError: it is malformed, too long, or needs what a finite automaton cannot do.
    """
    shown = repr(pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}…")
    work.count(_LETTER * len(pattern))
    try:
        parsed = parser.parse(pattern)
        return _Reader(work, without, is_of_json).chain(parsed, parsed.state.flags, True, True)
    except re.error as error:
        raise GrammarError(f"regex {shown}: {error}") from None
    except (RecursionError, OverflowError, ValueError, Warning) as error:  # Python may warn of a set
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise GrammarError(f"regex {shown}: {problem}") from None


class _Reader:
    def __init__(self, work: Work, without: Ranges, is_of_json: bool):
        self._work, self._without, self._is_of_json = work, without, is_of_json
        self._seen: set[Ranges] = set()

    def chain(self, items: Any, flags: int, is_first: bool, is_last: bool) -> Expression:
        """The expression of a sequence; whether it is at the beginning and at the end of the text."""
        parts: list[Expression] = []
        items = list(items)
        end = max((i for i, (name, _) in enumerate(items) if name is not constants.AT), default=-1)
        for index, (operation, argument) in enumerate(items):
            first = is_first and not parts
            last = is_last and index >= end
            if (part := self._one(str(operation), argument, flags, first, last)) is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _one(self, name: str, argument: Any, flags: int, first: bool, last: bool) -> Expression | None:
        if name == "LITERAL":
            return self._chars(self._cased(((argument, argument),), flags), chr(argument))
        if name == "NOT_LITERAL":
            return self._chars(complement(self._cased(((argument, argument),), flags)), f"[^{chr(argument)}]")
        if name == "ANY":
            return self._chars(EVERY if flags & re.DOTALL else minus(EVERY, single("\n")), ".")
        if name == "IN":
            return self._chars(self._class(argument, flags), "a class")
        if name == "BRANCH":
            return Either(tuple(self.chain(part, flags, first, last) for part in argument[1]))
        if name == "SUBPATTERN":
            _, added, removed, part = argument
            return self.chain(part, flags & ~removed | added, first, last)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, part = argument
            inner = self.chain(part, flags, False, False)
            return Repeat(inner, low, None if high is constants.MAXREPEAT else high)
        if name == "AT":
            self._check_anchor(str(argument), first, last)
            return None
        raise ValueError(f"it {_UNSUPPORTED.get(name, f'has {name}')}, which no finite automaton can")

    def _chars(self, chars: Ranges, what: str) -> Chars:
        self._count(chars)
        allowed = minus(chars, self._without) if self._without else chars
        if not allowed:
            raise ValueError(f"{what!r} stands for no character that is possible here")
        return Chars(allowed)

    def _check_anchor(self, name: str, first: bool, last: bool) -> None:
        """Allows an anchor only where it says what holds anyway."""
        is_beginning = name in ("AT_BEGINNING", "AT_BEGINNING_STRING")
        is_end = name in ("AT_END", "AT_END_STRING")
        if not ((is_beginning and first) or (is_end and last)):
            raise ValueError("an anchor inside of it, such as \\b, or ^ after something, is not supported")

    def _cased(self, chars: Ranges, flags: int) -> Ranges:
        if not flags & re.IGNORECASE:
            return ranges(chars)
        self._count(chars, sum(high - low for low, high in chars) // _FOLDED)
        return both_cases(chars, flags & re.ASCII)

    def _class(self, items: Any, flags: int) -> Ranges:
        pairs: list[tuple[int, int]] = []
        is_negated = False
        for operation, argument in items:
            name = str(operation)
            if name == "NEGATE":
                is_negated = True
            elif name == "LITERAL":
                pairs.append((argument, argument))
            elif name == "RANGE":
                pairs.append(argument)
            else:
                # What is taken away has to be the larger of both readings.
                is_smaller = self._is_of_json and ("NOT" in str(argument)) == is_negated
                pairs += matching(_CATEGORIES[str(argument)], re.ASCII if is_smaller else flags & re.ASCII)
        chars = self._cased(ranges(pairs), flags)
        return complement(chars) if is_negated else chars

    def _count(self, chars: Ranges, more: int = 0) -> None:
        """Counts the steps for a class, of which those for the same one are kept."""
        if chars not in self._seen:
            self._seen.add(chars)
            self._work.count(_RANGE * (len(chars) + more))
