"""The error of a bad configuration: one line that names the key."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxspec.documents import plain, plain_number
from jaxspec.errors import ConfigError

INT32_MAX = 2**31 - 1
"""The largest int32, in which the device counts."""


def use_plain_values(config: Any) -> None:
    """Replaces the numbers and arrays of NumPy or JAX in a frozen dataclass by Python's."""
    for each in dataclasses.fields(config):
        object.__setattr__(config, each.name, plain(getattr(config, each.name)))


def at_least(name: str, value: Any, minimum: int, maximum: int = INT32_MAX) -> None:
    """Raises ConfigError, naming `name`, unless the value is an integer from `minimum` to `maximum`."""
    value = plain_number(value)
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
