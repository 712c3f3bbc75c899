"""Errors of an engine other than bad input."""


class EngineError(RuntimeError):
    """The engine is closed, or its device failed for good."""


class QueueFullError(RuntimeError):
    """A client has reached its limit of unfinished requests."""
