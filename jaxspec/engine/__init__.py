"""The engine: state and steps on the device, scheduling on the host."""

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.engine.engine import Engine
from jaxspec.engine.errors import EngineError, QueueFullError
from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.statistics import AcceptanceStats
from jaxspec.engine.samples import Samples
from jaxspec.engine.scores import Scores

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
