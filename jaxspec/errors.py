"""Errors of one line, for bad input and for missing packages."""

import importlib
from types import ModuleType


class OneLineError(ValueError):
    """An error whose message is made one line of at most 1,000 printable characters."""

    def __init__(self, message: object):
        super().__init__(one_line(message))


class ConfigError(OneLineError):
    """The configuration cannot be used; the message names the key."""


def page(name: str) -> str:
    """The address of a page of docs/."""
    return f"https://github.com/jaxspec/jaxspec/blob/main/docs/{name}"


def one_line(message: object) -> str:
    """The message without line breaks and unprintable characters; a long one is shortened in the middle."""
    text = _shorten(str(message))
    if text.isprintable():
        return text
    return _shorten("".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split())))


def _shorten(text: str) -> str:
    return text if len(text) <= 1000 else f"{text[:497]} … {text[-500:]}"


def optional(module: str, *, extra: str) -> ModuleType:
    """Imports a module of a package that an extra of jaxspec installs.

    Raises:
      ModuleNotFoundError: it is not installed; the message is one line that names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # a dependency of the package is missing
            raise
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed: pip install 'jaxspec[{extra}]'", name=package
        ) from None
