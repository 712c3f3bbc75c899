"""The error of a bad configuration: one line that names the key."""

from typing import Any

from jaxspec.errors import OneLineError

INT32_MAX = 2**31 - 1
"""The largest int32, in which the device counts."""


class ConfigError(OneLineError):
    """The configuration cannot be used; the message names the key."""


def at_least(name: str, value: Any, minimum: int, maximum: int = INT32_MAX) -> None:
    """Raises ConfigError, naming `name`, unless the value is an int from `minimum` to `maximum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ConfigError(f"{name} must be a whole number of at most {maximum}, got {value!r}")
