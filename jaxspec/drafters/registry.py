"""Every kind of drafter, by the name that a configuration gives it."""

from typing import Any, cast

from jaxspec.config.drafter import DRAFTERS
from jaxspec.config.registry import register
from jaxspec.drafters.base import Drafter

KINDS: dict[str, type[Drafter]] = cast(Any, DRAFTERS)


def register_drafter(kind: str, drafter: type[Drafter]) -> None:
    """Makes a drafter known: `kind` then works in `jaxspec.load`, TOML files, scripts and inspection.

    Args:
      kind: for `drafter.kind`.
      drafter: its class; see `jaxspec.drafters.base.Drafter` and docs/writing-a-drafter.md.

    Raises:
      ValueError: another class has the name.
      TypeError: it is no class of drafters.
    """
    register(KINDS, kind, drafter, Drafter)
