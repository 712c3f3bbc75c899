"""Walking through documents of nested objects and lists, as in JSON and TOML."""

from collections.abc import Iterator, Mapping
from typing import Any


def levels(document: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yields all values of a document, one list per depth. Not recursive, so that any depth is safe."""
    containers: list[Any] = [document]
    while containers:
        children = (c.values() if isinstance(c, dict) else c for c in containers)
        values = [value for child in children for value in child]
        yield values
        containers = [value for value in values if isinstance(value, dict | list)]
