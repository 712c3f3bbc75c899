"""The metadata of a GGUF, with checks of types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jaxspec.files.errors import CheckpointError

Default = TypeVar("Default")


@dataclass(frozen=True)
class Metadata:
    """Typed access to metadata values by key.

    Methods with a default return it if the key is missing.

    Attributes:
      file: the file, for messages.
      values: all metadata by full key.
      prefix: put in front of every key, "llama." for example.

    Raises:
      CheckpointError: by every method, if the value has the wrong type; the message names the key.
    """

    file: str
    values: Mapping[str, Any]
    prefix: str = ""

    def under(self, name: str) -> "Metadata":
        """The values whose keys begin with "{name}."."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def size(self, key: str) -> int:
        """A positive integer; the key is required."""
        value = self.positive(key, None)
        if value is None:
            raise CheckpointError(
                f"{self.file}: metadata {self.prefix}{key} must be a positive integer, got None"
            )
        return value

    def positive(self, key: str, default: Default) -> int | Default:
        return self._get(key, default, "a positive integer", lambda v: type(v) is int and v > 0)

    def number(self, key: str, default: Default) -> float | Default:
        return self._get(key, default, "a number", lambda v: type(v) in (int, float))

    def decimal(self, key: str, default: float) -> float:
        """The shortest decimal that rounds to the stored float32: 1e-05, not 9.99999974e-06."""
        value = self.number(key, default)
        return float(str(np.float32(value))) if abs(value) <= float(np.finfo(np.float32).max) else value

    def count(self, key: str, default: int) -> int:
        return self._get(key, default, "a whole number from 0 on", lambda v: type(v) is int and v >= 0)

    def text(self, key: str, default: Default) -> str | Default:
        return self._get(key, default, "a string", lambda v: isinstance(v, str))

    def flag(self, key: str, default: Default) -> bool | Default:
        return self._get(key, default, "true or false", lambda v: isinstance(v, bool))

    def list(self, key: str, item: type, default: Default) -> list | Default:
        words = f"an array of {item.__name__}"
        return self._get(key, default, words, lambda v: isinstance(v, list) and set(map(type, v)) <= {item})

    def whole(self, key: str, default: Default) -> int | Default:
        return self._get(key, default, "a whole number", lambda v: type(v) is int)

    def _get(self, key: str, default: Any, words: str, fits: Callable[[Any], bool]) -> Any:
        key = self.prefix + key
        value = self.values.get(key, default)
        if key in self.values and not fits(value):
            raise CheckpointError(f"{self.file}: metadata {key} must be {words}, got {value!r}")
        return value
