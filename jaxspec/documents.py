"""Values of JSON and TOML: walking through nested ones, and numbers of other packages as Python's."""

from collections.abc import Iterator, Mapping
from typing import Any


def plain_number(value: Any) -> Any:
    """A scalar of NumPy, or an array of one number, as Python's number or bool; other values as they are."""
    if hasattr(value, "__array__") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def whole_number(value: Any) -> Any:
    """As `plain_number`; a float without a fraction, as programs of other languages write integers, as an
    int."""
    value = plain_number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(value: Any) -> Any:
    """`plain_number` for a value, and for each item of a list, a tuple or an array of one axis."""
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(plain_number, value))
    return plain_number(value)


def levels(document: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yields all values of a document, one list per depth. Not recursive, so that any depth is safe."""
    containers: list[Any] = [document]
    while containers:
        children = (c.values() if isinstance(c, dict) else c for c in containers)
        values = [value for child in children for value in child]
        yield values
        containers = [value for value in values if isinstance(value, dict | list)]
