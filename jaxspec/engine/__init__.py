"""The engine: state and steps on the device, scheduling on the host."""

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import AcceptanceStats, Delta, Generation

__all__ = ["AcceptanceStats", "Delta", "Engine", "Generation"]
