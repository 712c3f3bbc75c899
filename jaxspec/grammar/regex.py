"""Regular expressions in Python's syntax, read by Python's own parser.

The parser is a private module of the standard library. It is the only one that agrees with `re` on what a
pattern means, which is what users test theirs with.
"""

import re
from collections.abc import Callable

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
from jaxspec.grammar.ecma import python_pattern
from jaxspec.grammar.expression import Both, Chain, Chars, Either, Expression, Repeat
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
_ANYTHING = list(parser.parse("(?s:.*)"))
_BEGINNINGS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_ENDS = ("AT_END", "AT_END_STRING")


def regex_expression(pattern: str, work: Work) -> Expression:
    """The expression of all texts that a pattern matches from their beginning to their end.

    Args:
      pattern: in the syntax of `re`, whatever needs no memory of what was matched.
      work: counts the steps.

    Raises:
      GrammarError: it is malformed, too long, or needs what a finite automaton cannot do.
    """
    return _read(
        pattern, pattern, work, lambda parsed: _Reader(work).chain(parsed, parsed.state.flags, True, True)
    )


def schema_pattern_expression(
    pattern: str, work: Work, *, without: Ranges = (), is_search: bool = False
) -> Expression:
    """The expression of strings in which a JSON schema's pattern matches.

    Args:
      pattern: in ECMAScript's syntax.
      work: counts the steps.
      without: characters that the strings must not hold; classes lose them.
      is_search: whether all such strings are asked for, as ECMAScript has it. Otherwise a pattern with no
        anchor matches the whole string, and strings match, too, if \\d, \\w and \\s stand for characters of
        ASCII alone, and if they do not.

    Raises:
      GrammarError: as `regex_expression`.
    """
    reader = _Reader(work, without, is_search)
    return _read(
        pattern,
        python_pattern(pattern, work),
        work,
        lambda parsed: reader.searched(parsed, parsed.state.flags),
    )


def _read(pattern: str, of_python: str, work: Work, read: Callable[[Any], Expression]) -> Expression:
    shown = repr(pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}…")
    work.count(_LETTER * len(pattern))
    try:
        return read(parser.parse(of_python))
    except re.error as error:
        raise GrammarError(f"regex {shown}: {error}") from None
    except (RecursionError, OverflowError, ValueError, Warning) as error:  # Python may warn of a set
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise GrammarError(f"regex {shown}: {problem}") from None


class _Reader:
    def __init__(self, work: Work, without: Ranges = (), is_search: bool | None = None):
        self._work, self._without, self._is_search = work, without, is_search
        self._is_refused = False  # whether texts are left out that match what is read
        self._seen: set[Ranges] = set()

    def chain(self, items: Any, flags: int, is_first: bool, is_last: bool) -> Expression:
        """The expression of a sequence; whether it is at the beginning and at the end of the text."""
        parts: list[Expression] = []
        items = list(items)
        end = max((i for i, (name, _) in enumerate(items) if name is not constants.AT), default=-1)
        for index, (operation, argument) in enumerate(items):
            first = is_first and not parts
            last = is_last and index >= end
            if str(operation) in ("ASSERT", "ASSERT_NOT") and argument[0] > 0 and is_last:
                return Chain((*parts, self._ahead(operation, argument[1], items[index + 1 :], flags, first)))
            if (part := self._one(str(operation), argument, flags, first, last)) is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _ahead(self, operation: Any, ahead: Any, rest: list[Any], flags: int, is_first: bool) -> Both:
        """The rest of the text, of which something says how it begins, or how it does not."""
        is_refused = str(operation) == "ASSERT_NOT"
        self._is_refused ^= is_refused
        begun = self.searched(ahead, flags, is_first, is_begun=True)
        self._is_refused ^= is_refused
        parts = (self.chain(rest, flags, is_first, True), *(() if is_refused else (begun,)))
        return Both(parts, (begun,) if is_refused else ())

    def searched(
        self, items: Any, flags: int, is_first: bool = True, *, is_begun: bool = False
    ) -> Expression:
        """The expression of a pattern with anything before or behind it where no anchor says that nothing is.

        Args:
          is_begun: nothing is before it, whatever it says.
        """
        items = list(items)
        for index in (0, len(items) - 1) if items else ():
            if options := _anchored_options(*items[index]):
                self._work.count(_LETTER * len(items) * len(options))
                each = ([*items[:index], *option, *items[index + 1 :]] for option in options)
                return Either(tuple(self.searched(one, flags, is_first, is_begun=is_begun) for one in each))
        is_at = [str(operation) == "AT" and str(argument) for operation, argument in items] or [False]
        before, behind = is_begun or is_at[0] in _BEGINNINGS, is_at[-1] in _ENDS
        if not (before or behind or self._is_search):
            return self.chain(items, flags, is_first, True)
        # What is behind belongs to what a pattern says of the rest of the text.
        pattern = self.chain([*items, *(() if behind else _ANYTHING)], flags, is_first, True)
        return pattern if before else Chain((self.chain(_ANYTHING, flags, False, False), pattern))

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
        if not ((name in _BEGINNINGS and first) or (name in _ENDS and last)):
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
                pairs += self._category(str(argument), is_negated, flags)
        chars = self._cased(ranges(pairs), flags)
        return complement(chars) if is_negated else chars

    def _category(self, name: str, is_negated: bool, flags: int) -> Ranges:
        if self._is_search is None:
            return matching(_CATEGORIES[name], flags & re.ASCII)
        is_not, category = "NOT" in name, _CATEGORIES[name.replace("NOT_", "")]
        every = matching(category)
        if category == r"\s":
            every = ranges((*every, (0xFEFF, 0xFEFF)))
        # What is taken away has to be the larger of both readings, and what is allowed the smaller one.
        is_smaller = (is_not == is_negated) != self._is_refused
        is_ascii = category != r"\s" if self._is_search else is_smaller
        of_it = matching(category, re.ASCII) if is_ascii else every
        return complement(of_it) if is_not else of_it

    def _count(self, chars: Ranges, more: int = 0) -> None:
        """Counts the steps for a class, of which those for the same one are kept."""
        if chars not in self._seen:
            self._seen.add(chars)
            self._work.count(_RANGE * (len(chars) + more))


def _anchored_options(operation: Any, argument: Any) -> list[Any]:
    """What stands for a group or alternatives that have an anchor in them; nothing for others."""
    name = str(operation)
    if name == "SUBPATTERN" and not any(argument[1:3]):
        options = [argument[3]]
    elif name == "BRANCH":
        options = argument[1]
    else:
        return []
    is_anchored = any(
        str(inner[0]) == "AT" or _anchored_options(*inner) for option in options for inner in option
    )
    return list(options) if is_anchored else []
