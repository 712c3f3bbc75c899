"""Numbers within bounds, as their digits."""

from fractions import Fraction
from math import ceil, floor

from jaxspec.grammar.expression import Chars, Either, Expression, Remainders, Repeat, chain, either, text

DIGIT = Chars(((ord("0"), ord("9")),))
_NOT_ZERO = Chars(((ord("1"), ord("9")),))
_ANY_DIGITS = Repeat(DIGIT, 0, None)
_ZEROS = Repeat(text("0"), 0, None)
_PRECISE = 15
"""Digits of numbers that floats of 64 bits tell apart."""
Bound = tuple[Fraction, bool]
"""Of numbers, and whether it is not among them."""


def integers(low: Bound | None, high: Bound | None) -> Expression | None:
    """The integers within bounds, None if there are none."""
    least = None if low is None else floor(low[0]) + 1 if low[1] else ceil(low[0])
    most = None if high is None else ceil(high[0]) - 1 if high[1] else floor(high[0])
    if least is not None and most is not None and least > most:
        return None
    parts: list[Expression] = []
    if most is None or most >= 0:
        parts.append(_natural(max(least or 0, 0), most))
    if least is None or least < 0:
        nearest = 1 if most is None else max(-most, 1)
        parts.append(chain(text("-"), _natural(nearest, None if least is None else -least)))
    return either(parts)


def at_least(bound: Bound) -> Expression:
    """Numbers without an exponent that are not below a bound."""
    value, is_strict = bound
    if value > 0:
        return _from(bound)
    positive = _from(bound) if not value and is_strict else _from((Fraction(0), False))
    below = _up_to((-value, is_strict)) if value or not is_strict else None
    return positive if below is None else Either((positive, chain(text("-"), below)))


def at_most(bound: Bound) -> Expression:
    """Numbers without an exponent that are not above a bound."""
    value, is_strict = bound
    if value < 0:
        return chain(text("-"), _from((-value, is_strict)))
    above = _up_to(bound) if value or not is_strict else None
    negative = chain(text("-"), _from((Fraction(0), not value and is_strict)))
    return negative if above is None else Either((negative, above))


def multiples(of: int) -> Expression:
    """The integers that are multiples of a number."""
    return chain(Repeat(text("-"), 0, 1), Remainders(of))


def _from(bound: Bound) -> Expression:
    """Numbers from a bound that is not below 0 on."""
    whole, digits, room = _split(bound)
    larger = chain(_natural(whole + 1, None), _fraction(None))
    return Either((larger, chain(text(str(whole)), _fraction_from(digits, room))))


def _up_to(bound: Bound) -> Expression:
    """Numbers from 0 to a bound, which is above 0, or 0 if it is one of them."""
    whole, digits, room = _split(bound)
    parts: list[Expression] = [chain(_natural(0, whole - 1), _fraction(room))] if whole else []
    if digits:
        parts.append(chain(text(str(whole)), Repeat(chain(text("."), _digits_up_to(digits, room)), 0, 1)))
    elif room is None:
        parts.append(chain(text(str(whole)), Repeat(chain(text(".0"), _ZEROS), 0, 1)))
    return either(parts)


def _split(bound: Bound) -> tuple[int, str, int | None]:
    """The integer below a number, its digits behind the point, and how many more may follow these.

    Without a limit if the bound is among the numbers. Otherwise they end where a float could be the bound.
    """
    whole, digits = floor(bound[0]), ""
    rest = bound[0] - whole
    while rest:
        digits += str(floor(10 * rest))
        rest = 10 * rest % 1
    return whole, digits, max(_PRECISE - len(str(whole)) - len(digits), 0) if bound[1] else None


def _fraction(most: int | None) -> Expression:
    """A point and up to so many digits, or nothing."""
    return Repeat(chain(text("."), Repeat(DIGIT, 1, most)), 0, 1) if most != 0 else chain()


def _fraction_from(digits: str, room: int | None) -> Expression:
    """Digits behind a point, with it, that are not below some."""
    if digits:
        return chain(text("."), _digits_from(digits, room))
    return _fraction(None) if room is None else chain(text("."), _above_zero(room))


def _above_zero(room: int) -> Expression:
    return chain(Repeat(text("0"), 0, room // 2), _NOT_ZERO, Repeat(DIGIT, 0, room // 2))


def _digits_from(digits: str, room: int | None) -> Expression:
    first, rest = int(digits[0]), digits[1:]
    following = _digits_from(rest, room) if rest else _ANY_DIGITS if room is None else _above_zero(room)
    parts = [chain(digit(first, first), following)]
    return either(parts + ([chain(digit(first + 1, 9), _ANY_DIGITS)] if first < 9 else []))


def _digits_up_to(digits: str, room: int | None) -> Expression:
    first, rest = int(digits[0]), digits[1:]
    parts: list[Expression] = []
    if first:
        more = None if room is None else len(rest) + room
        parts.append(chain(digit(0, first - 1), Repeat(DIGIT, 0, more)))
    if rest:
        parts.append(chain(digit(first, first), Repeat(_digits_up_to(rest, room), 0, 1)))
    elif room is None:
        parts.append(chain(digit(first, first), _ZEROS))
    return either(parts)


def digit(low: int, high: int) -> Expression:
    """A digit from `low` to `high`."""
    return Chars(((ord("0") + low, ord("0") + high),))


def _same_length(low: str, high: str) -> Expression:
    """Numbers of as many digits from `low` to `high`."""
    if not low:
        return chain()
    first, last = int(low[0]), int(high[0])
    if first == last:
        return chain(digit(first, first), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    parts = []
    if low[1:].strip("0"):
        parts.append(chain(digit(first, first), _same_length(low[1:], "9" * rest)))
        first += 1
    if high[1:].strip("9"):
        parts.append(chain(digit(last, last), _same_length("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(chain(digit(first, last), Repeat(DIGIT, rest, rest)))
    return either(parts)


def _natural(low: int, high: int | None) -> Expression:
    """Numbers from `low`, 0 or more, to `high`."""
    parts: list[Expression] = []
    digits = len(str(low))
    while high is None or digits <= len(str(high)):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        parts.append(_same_length(str(first), str(last)))
        digits += 1
        if high is None:
            return either([*parts, chain(_NOT_ZERO, Repeat(DIGIT, digits - 1, None))])
    return either(parts)
