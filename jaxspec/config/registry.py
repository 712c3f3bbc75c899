"""Classes by the names that configurations give them."""

from typing import TypeVar

T = TypeVar("T", bound=type)


def register(registry: dict[str, T], name: str, entry: T, base: type) -> None:
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
