"""Registries: classes by the names that configurations and checkpoints give them."""

import importlib
from collections import UserDict
from collections.abc import MutableMapping
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


class Registry(UserDict[str, Any]):
    """Entries by name; the package that registers jaxspec's own is imported when the first is looked up."""

    def __init__(self, package: str):
        self._package = package
        self._entries: dict[str, Any] = {}

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        importlib.import_module(self._package)
        return self._entries


def register(registry: MutableMapping[str, T], name: str, entry: T, base: type) -> None:
    """Adds a subclass of `base`. Defining a class again, as in a notebook cell, replaces the old one.

    Raises:
      ValueError: another class has this name.
      TypeError: `entry` is not a subclass of `base`.
    """
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise TypeError(f"{name!r} must stand for a subclass of {base.__name__}, got {entry!r}")
    taken = registry.get(name, entry)
    if (taken.__module__, taken.__qualname__) != (entry.__module__, entry.__qualname__):
        raise ValueError(f"{name!r} is taken by {taken.__module__}.{taken.__qualname__}")
    registry[name] = entry
