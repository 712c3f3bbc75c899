"""Expressions: what every kind of grammar becomes before it becomes an automaton."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxspec.grammar.characters import Ranges


@dataclass(frozen=True)
class Chars:
    """One character of a set, which is not empty."""

    ranges: Ranges


@dataclass(frozen=True)
class Chain:
    """Its parts one after another."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Either:
    """One of its parts, of which there is at least one."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeat:
    """A part `low` to `high` times; without a limit if `high` is None."""

    part: "Expression"
    low: int
    high: int | None


@dataclass(frozen=True)
class Listed:
    """Parts in order with a separator between those that are there; (part, whether it may be left out)."""

    parts: tuple[tuple["Expression", bool], ...]
    separator: "Expression"


@dataclass(frozen=True)
class Separated:
    """A part any number of times with a separator between; at least once unless it may be missing."""

    part: "Expression"
    separator: "Expression"
    may_be_missing: bool


@dataclass(frozen=True)
class Both:
    """What every part accepts, and none of `without`."""

    parts: tuple["Expression", ...]
    without: tuple["Expression", ...] = ()


@dataclass(frozen=True)
class Remainders:
    """The digits of the multiples of a number, which is above 0."""

    of: int


Expression = Chars | Chain | Either | Repeat | Listed | Separated | Both | Remainders


def text(characters: str) -> Chain:
    """A text as it stands."""
    return Chain(tuple(map(_character, characters)))


@lru_cache(maxsize=1 << 14)
def _character(character: str) -> Chars:
    return Chars(((ord(character), ord(character)),))


def chain(*parts: Expression) -> Chain:
    """Parts one after another."""
    return Chain(parts)


def either(parts: Sequence[Expression]) -> Expression:
    """One of the parts, of which there is at least one."""
    return parts[0] if len(parts) == 1 else Either(tuple(parts))
