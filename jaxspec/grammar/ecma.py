"""Patterns of JSON Schema, which are ECMAScript's, in the syntax of Python's `re`."""

import re
import unicodedata
from functools import cache

from jaxspec.grammar.characters import Ranges, ranges
from jaxspec.grammar.work import Work
from jaxspec.sampling.grammar import GrammarError

_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\c(?P<control>[A-Za-z])|\\(?P<not>[pP])\{(?:General_Category=|gc=)?(?P<category>[A-Z][a-z]?)\}"
    r"|\\k<(?P<back>\w+)>|\\(?P<escaped>.)|\(\?<(?P<name>[A-Za-z_]\w*)>|(?P<count>\{\d+(?:,\d*)?\})|(?P<other>.)",
    re.DOTALL,
)
_OF_PYTHON = set("AZaNU")
"""Letters that stand for something behind a backslash in Python, and for nothing in ECMAScript."""
_IS_CLASS = re.compile(r"\\[dDsSwWpP]").match
_NO_LINE_ENDS = r"[^\n\r\u2028\u2029]"


def python_pattern(pattern: str, work: Work) -> str:
    """A pattern of ECMAScript, with its flag u or without, as `re` reads it; `work` counts its letters.

    Raises:
      GrammarError: it has what means nothing there, or is too long.
    """
    written: list[str] = []
    in_class, before = False, ""
    for token in _TOKEN.finditer(pattern):
        is_first = in_class and before in ("[", "[^")
        part, other = _escaped(token), token["other"]
        if part is None and in_class:
            if other == "]" and before == "[":
                raise GrammarError(f"the pattern {pattern[:80]!r} has a class without a character")
            is_all = other == "]" and before == "[^"
            if is_all:
                written[-2:] = ["", ""]
            part = "(?s:.)" if is_all else _in_class(token[0], is_first)
            if other == "-" and (_IS_CLASS(before) or _IS_CLASS(pattern[token.end() :])):
                part = r"\-"
            in_class = other != "]"
        elif part is None:
            in_class = other == "["
            part = _NO_LINE_ENDS if other == "." else "\\{" if other == "{" else token[0]
        elif in_class and token["category"]:
            part = part[1:-1] if token["not"] == "p" else _refused(token[0])
        before = "[^" if before == "[" and other == "^" and in_class else token[0]
        work.count(len(part))
        written.append(part)
    return "".join(written)


def _escaped(token: re.Match[str]) -> str | None:
    """What begins with a backslash, and the name of a group."""
    if token["code"]:
        return f"\\U{int(token['code'], 16):08x}"
    if token["high"]:
        pair = bytes.fromhex(token["high"] + token["low"]).decode("utf-16-be")
        return f"\\U{ord(pair):08x}"
    if token["control"]:
        return f"\\x{ord(token['control']) % 32:02x}"
    if token["category"]:
        of_it = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in _category(token["category"]))
        return f"[{of_it}]" if token["not"] == "p" else f"[^{of_it}]"
    if token["back"]:
        return f"(?P={token['back']})"
    if token["name"]:
        return f"(?P<{token['name']}>"
    if token["escaped"]:
        return _refused(token[0]) if token["escaped"] in _OF_PYTHON else token[0]
    return None


def _in_class(character: str, is_first: bool) -> str:
    """A character of a class, where Python knows nested ones, and operators of two signs."""
    is_plain = character == "]" or (character in "^-" and not is_first) or character not in "[&|~"
    return character if is_plain else f"\\{character}"


def _refused(text: str) -> str:
    raise GrammarError(f"{text!r} is not supported in the pattern of a schema")


def _category(name: str) -> Ranges:
    """The characters of a category of Unicode, such as L or Lu."""
    return ranges(
        pair for category, pairs in _categories().items() if category.startswith(name) for pair in pairs
    )


@cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    pairs: dict[str, list[tuple[int, int]]] = {}
    for code in range(0x110000):
        of_it = pairs.setdefault(unicodedata.category(chr(code)), [])
        if of_it and of_it[-1][1] == code - 1:
            of_it[-1] = (of_it[-1][0], code)
        else:
            of_it.append((code, code))
    return pairs
