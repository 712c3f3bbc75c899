"""The error of a grammar that cannot be used."""

from jaxspec.errors import OneLineError


class GrammarError(OneLineError):
    """A grammar is malformed, not supported or too large; the text names what."""
