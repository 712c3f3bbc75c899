"""The error of an input as a whole."""


class InputError(ValueError):
    """The input cannot be read; the message names it."""
