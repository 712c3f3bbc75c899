"""The registry of drafters, by their name in configurations."""

from typing import Any, cast

from jaxspec.config import drafter as drafter_config
from jaxspec.drafters.base import Drafter
from jaxspec.registry import register

DRAFTERS: dict[str, type[Drafter]] = cast(Any, drafter_config.DRAFTERS)


def register_drafter(kind: str, drafter: type[Drafter]) -> None:
    """Registers a drafter, so that `kind` works in `jaxspec.load`, TOML files, scripts and inspection.

    Args:
      kind: the name for `drafter.kind`.
      drafter: a subclass of `Drafter`; see docs/writing-a-drafter.md.

    Raises:
      ValueError: another class is registered under this name.
      TypeError: `drafter` is not a subclass of `Drafter`.
    """
    register(DRAFTERS, kind, drafter, Drafter)
