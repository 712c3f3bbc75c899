"""Reads the memory layout of XLA's foreign function interface from jaxlib's C header."""

import ctypes
import re
from functools import cache
from typing import Any

_MEMBER = re.compile(
    r"^\s*(?:_XLA_FFI_API_STRUCT_FIELD\((?P<function>\w+)\)|(?P<kind>.*\W)(?P<name>\w+));", re.M
)
_SIZES = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64}


class UnknownLayoutError(RuntimeError):
    """The header does not declare a structure or member; the message names it."""


def api_version(header: str) -> int:
    """The interface's version: the major number in the lower half of a 64-bit word, the minor in the upper.

    Raises:
      UnknownLayoutError: the header has no version.
    """
    parts = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    if None in parts:
        raise UnknownLayoutError("its header has no version")
    major, minor = (int(part[1]) for part in parts if part)
    return major | minor << 32


def word_of(header: str, structure: str, *members: str) -> int:
    """The offset of a member in a structure, in 64-bit words.

    Args:
      header: text of the header.
      structure: name of the structure.
      members: name of the member, or a path of names through nested structures.

    Raises:
      UnknownLayoutError: there is no such member, or it is not aligned to a word.
    """
    kind, offset = _structure(header, structure), 0
    for member in members:
        if kind is None or not hasattr(kind, member):
            raise UnknownLayoutError(f"its header has no {structure}.{'.'.join(members)}")
        offset += getattr(kind, member).offset
        kind = dict(kind._fields_)[member]
    if offset % 8:
        raise UnknownLayoutError(f"{structure}.{'.'.join(members)} is not a word")
    return offset // 8


@cache
def _structure(header: str, name: str) -> Any:
    """The structure as a `ctypes.Structure`; None if the header has none of this name."""
    found = re.search(rf"^(?:typedef )?struct {name} {{$(.*?)^}}", header, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    body = re.sub(r"//.*", "", found[1])
    fields = [
        (part["function"] or part["name"], _kind(header, part["kind"])) for part in _MEMBER.finditer(body)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _kind(header: str, kind: str | None) -> Any:
    """The `ctypes` type of a member. Whatever is neither a pointer nor a known type is taken for an int."""
    if kind is None or "*" in kind:
        return ctypes.c_void_p
    return _SIZES.get(kind.strip()) or _structure(header, kind.strip()) or ctypes.c_int
