"""Errors of one line, for bad input."""


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
