"""How a configuration is refused: one line that names the key."""

from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key."""


def at_least(name: str, value: Any, minimum: int) -> None:
    """Refuses a value that is not a whole number of at least `minimum`, by its name."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
