"""The engine: state and steps on the device, scheduling on the host."""

from jaxspec.engine.api.async_engine import AsyncEngine
from jaxspec.engine.api.engine import Engine
from jaxspec.engine.api.samples import Samples
from jaxspec.engine.api.scores import Scores
from jaxspec.engine.errors import EngineError, QueueFullError
from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.statistics import AcceptanceStats

__all__ = [
    "AcceptanceStats",
    "AsyncEngine",
    "Delta",
    "Engine",
    "EngineError",
    "Generation",
    "QueueFullError",
    "Request",
    "Samples",
    "Scores",
]
