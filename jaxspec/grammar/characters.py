"""Sets of characters as ranges of code points, and their spelling in UTF-8."""

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

Ranges = tuple[tuple[int, int], ...]
"""A set of code points: inclusive ranges in order, none of which touch."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The set of the code points in any of the inclusive ranges, without surrogates."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return _without(joined, _SURROGATES)


def _without(pairs: Iterable[tuple[int, int]], hole: tuple[int, int]) -> Ranges:
    parts = []
    for low, high in pairs:
        parts += [(low, min(high, hole[0] - 1)), (max(low, hole[1] + 1), high)]
    return tuple((low, high) for low, high in dict.fromkeys(parts) if low <= high)


def complement(chars: Ranges) -> Ranges:
    """All other characters."""
    gaps, start = [], 0
    for low, high in chars:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, _LAST))
    return ranges(pair for pair in gaps if pair[0] <= pair[1])


def minus(chars: Ranges, others: Ranges) -> Ranges:
    """The characters of the first set that are not in the second."""
    return complement(ranges((*complement(chars), *others)))


def single(text: str) -> Ranges:
    """The set of the characters in a text."""
    return ranges((ord(character), ord(character)) for character in text)


EVERY = ranges([(0, _LAST)])
"""Every character."""


@lru_cache(maxsize=256)
def matching(pattern: str, flags: int = 0) -> Ranges:
    """The characters that a pattern for one character matches, such as \\w."""
    runs = re.finditer(f"(?:{pattern})+", _every_character(), flags)
    found = []
    for run in runs:
        first, last = ord(run[0][0]), ord(run[0][-1])
        found.append((first, last))
    return ranges(found)


@cache
def _every_character() -> str:
    return "".join(map(chr, range(_SURROGATES[0]))) + "".join(map(chr, range(_SURROGATES[1] + 1, _LAST + 1)))


@lru_cache(maxsize=256)
def both_cases(chars: Ranges, flags: int = 0) -> Ranges:
    """The set with the other cases of its letters, as `re.IGNORECASE` knows them."""
    pattern = "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in chars) + "]"
    others = re.findall(pattern, _cased_characters(), flags | re.IGNORECASE)
    return ranges((*chars, *((ord(other), ord(other)) for other in others)))


@cache
def _cased_characters() -> str:
    return "".join(c for c in map(chr, range(0x20000)) if c.lower() != c or c.upper() != c)


ByteRanges = tuple[tuple[int, int], ...]


def utf8_sequences(chars: Ranges) -> Iterator[ByteRanges]:
    """The set as sequences of one to four ranges of bytes: a character is in it if one matches its UTF-8."""
    for low, high in chars:
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST)):
            if low <= last and high >= first:
                yield from _same_length(max(low, first), min(high, last))


def _same_length(low: int, high: int) -> Iterator[ByteRanges]:
    """Splits a range whose ends have as many bytes until every byte has a range of its own."""
    first, last = chr(low).encode("utf-8", "surrogatepass"), chr(high).encode("utf-8", "surrogatepass")
    for tail in range(1, len(first)):
        mask = (1 << 6 * tail) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _same_length(low, low | mask)
                yield from _same_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _same_length(low, (high & ~mask) - 1)
                yield from _same_length(high & ~mask, high)
                return
    yield tuple(zip(first, last, strict=True))
