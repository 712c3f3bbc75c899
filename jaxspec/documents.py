"""Documents of nested objects and lists, as JSON and TOML make them."""

from collections.abc import Iterator, Mapping
from typing import Any


def levels(document: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The values of a document, those of one depth together; by no recursion, which a deep one would end."""
    containers: list[Any] = [document]
    while containers:
        children = (c.values() if isinstance(c, dict) else c for c in containers)
        values = [value for child in children for value in child]
        yield values
        containers = [value for value in values if isinstance(value, dict | list)]
