"""The one exception of this package."""


class CheckpointError(ValueError):
    """A checkpoint, tokenizer or chat that cannot be used; the message names the offender in one line."""
