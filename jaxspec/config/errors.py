"""How a configuration is refused: one line that names the key."""

from typing import Any

from jaxspec.errors import OneLineError

INT32_MAX = 2**31 - 1
"""The largest number that the device counts to."""


class ConfigError(OneLineError):
    """A configuration that cannot be used; the message names the key."""


def at_least(name: str, value: Any, minimum: int, maximum: int = INT32_MAX) -> None:
    """Refuses a value that is not a whole number of at least `minimum` and at most `maximum`, by its name."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ConfigError(f"{name} must be a whole number of at most {maximum}, got {value!r}")
