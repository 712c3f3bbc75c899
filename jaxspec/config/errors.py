"""The error of a bad configuration: one line that names the key."""

import math
from collections.abc import Sequence
from typing import Any

from jaxspec.errors import ConfigError

INT32_MAX = 2**31 - 1
"""The largest int32, in which the device counts."""


def at_least(name: str, value: Any, minimum: int, maximum: int = INT32_MAX) -> None:
    """Raises ConfigError, naming `name`, unless the value is an int from `minimum` to `maximum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ConfigError(f"{name} must be a whole number of at most {maximum}, got {value!r}")


def positive(name: str, value: float) -> None:
    """Raises ConfigError, naming `name`, unless the number is finite and above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")


def all_of(name: str, values: Sequence[Any], kind: type, what: str) -> None:
    """Raises ConfigError, naming `name`, unless every value is of this type."""
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{name} must be {what}, got {value!r}")
