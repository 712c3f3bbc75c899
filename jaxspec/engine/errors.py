"""What an engine can fail with, beside bad input."""


class EngineError(RuntimeError):
    """The engine is closed, or its device failed for good."""


class QueueFullError(RuntimeError):
    """As many requests are unfinished as a client allows itself."""
