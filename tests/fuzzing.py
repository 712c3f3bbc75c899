"""Damaged documents and files, which a reader must either accept or reject with our own exceptions."""

import copy
import math
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hypothesis import strategies as st

from jaxspec import CheckpointError, ConfigError

T = TypeVar("T")

MEMORY = 100 * 2**20

INTEGERS = (-1, 0, 1, 2, 3, 8, 1000, 2**24, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**12, 10**30, 10**400)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-45, 1e-320, 1e30, 1e39, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", " ", "a", "\x00", "\n", "\ud800", "🎉", "..", "/", "x" * 300, "yarn", "full_attention")

SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(INTEGERS)
    | st.sampled_from(FLOATS)
    | st.sampled_from(TEXTS)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def refused_or(call: Callable[[], T]) -> T | None:
    """The result of a call; None if it raises one of our own exceptions with one line.

    Any other exception is passed on. Using more memory than any of these files may take is a failure, too.
    """
    tracemalloc.start()
    try:
        return call()
    except (CheckpointError, ConfigError) as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY
    assert message.isprintable()
    assert len(message) <= 1000
    return None


@st.composite
def changed(draw: st.DrawFn, document: Mapping[str, Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A document with one to three values changed, copied or removed, or keys added, some of `keys`."""
    broken = copy.deepcopy(dict(document))
    for _ in range(draw(st.integers(1, 3))):
        container, key = _place(draw, broken)
        if isinstance(container, dict) and draw(st.integers(0, 3)) == 0:
            key = draw(st.sampled_from(keys) if keys else st.text(max_size=8))
        change = draw(st.sampled_from(["value", "kin", "kin", "copy", "remove", "wrap"]))
        if change == "value":
            container[key] = draw(VALUES)
        elif change == "kin":
            container[key] = draw(_kin(_item(container, key)))
        elif change == "copy":
            container[key] = copy.deepcopy(_item(*_place(draw, broken)))
        elif change == "wrap":
            container[key] = [{"": copy.deepcopy(broken)}]
        elif isinstance(container, list) or key in container:
            del container[key]
    return broken


def _place(draw: st.DrawFn, document: dict[str, Any]) -> tuple[Any, Any]:
    """A container in a document, and a key or index in it; small containers are as likely as large ones."""
    container: Any = document
    key = draw(_keys(document))
    while (inner := _item(container, key)) and isinstance(inner, dict | list) and draw(st.integers(0, 4)):
        container, key = inner, draw(_keys(inner))
    return container, key


def _keys(container: Any) -> st.SearchStrategy[Any]:
    if isinstance(container, dict):
        return st.sampled_from(sorted(container)) if container else st.just("")
    return st.integers(0, len(container) - 1)


def _item(container: Any, key: Any) -> Any:
    return container.get(key) if isinstance(container, dict) else container[key]


def _kin(value: Any) -> st.SearchStrategy[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from(INTEGERS) | st.integers(0, 300)
    if isinstance(value, float):
        return st.sampled_from(FLOATS) | st.floats()
    if isinstance(value, str):
        return st.sampled_from(TEXTS) | st.text(max_size=8)
    return VALUES


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with bytes changed, removed, inserted or repeated, or truncated."""
    broken = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(broken)))
        size = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 64]))
        change = draw(st.sampled_from(["set", "set", "set", "cut", "insert", "double", "end"]))
        if change == "set":
            fixed = st.sampled_from([b"\xff" * size, b"\x00" * size])
            broken[at : at + size] = draw(st.binary(min_size=size, max_size=size) | fixed)
        elif change == "cut":
            del broken[at : at + size]
        elif change == "insert":
            broken[at:at] = draw(st.binary(min_size=1, max_size=size))
        elif change == "double":
            broken[at:at] = broken[at : at + size]
        else:
            del broken[at:]
    return bytes(broken)
