"""Sections of a TOML file as frozen dataclasses, with all keys and types checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.errors import ConfigError
from jaxspec.documents import plain
from jaxspec.spelling import known_names


def build_section(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """An instance of the frozen dataclass `cls` from one section of a TOML file.

    Raises:
      ConfigError: an unknown key, a missing one, a value of the wrong type, or one that `cls` rejects.
    """
    values = _checked(cls, section, values)
    for f in dataclasses.fields(cls):
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if f.name not in values and not optional:
            raise ConfigError(f"{section}.{f.name} is missing")
    return cls(**values)


def replace_section(current: Any, section: str, values: Mapping[str, Any]) -> Any:
    """A copy of a configuration with some keys changed, checked as in `build_section`."""
    return dataclasses.replace(current, **_checked(type(current), section, values))


def _checked(cls: type, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with numbers of other packages as Python's.

    Raises:
      ConfigError: an unknown key, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section} must be a mapping of keys to values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {key: plain(value) for key, value in values.items()}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown key {section}.{key}; {known_names(key, fields)}")
        allowed = fields[key].type
        assert not isinstance(allowed, str)
        accepts = getattr(allowed, "__args__", (allowed,))
        fits = isinstance(value, allowed) or (float in accepts and isinstance(value, int))
        if (isinstance(value, bool) and bool not in accepts) or not fits:
            names = " or ".join("nothing" if t is type(None) else t.__name__ for t in accepts)
            raise ConfigError(f"{section}.{key} must be {names}, got {value!r}")
    return values
