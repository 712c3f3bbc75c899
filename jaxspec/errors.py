"""What every refusal of foreign input is: one line; and so is that of a package that is not there."""

import importlib
from types import ModuleType


class OneLineError(ValueError):
    """A refusal whose message is one line of at most 1,000 printable characters, whatever was put into it."""

    def __init__(self, message: object):
        super().__init__(one_line(message))


def one_line(message: object) -> str:
    """A message without line breaks and unprintable characters, and without the middle of a long one."""
    text = _shorten(str(message))
    if text.isprintable():
        return text
    return _shorten("".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split())))


def _shorten(text: str) -> str:
    return text if len(text) <= 1000 else f"{text[:497]} … {text[-500:]}"


def optional(module: str, *, extra: str) -> ModuleType:
    """A module of a package that only an extra of jaxspec installs.

    Raises:
      ModuleNotFoundError: it is not installed; one line that names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it lacks a package of its own
            raise
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed: pip install 'jaxspec[{extra}]'", name=package
        ) from None
