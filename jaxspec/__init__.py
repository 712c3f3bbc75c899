"""Speculative decoding for JAX: draft, verify and emit in one compiled step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.checkpoints import CheckpointError
    from jaxspec.config import ConfigError, DrafterConfig, EngineConfig, list_configs
    from jaxspec.engine import (
        AcceptanceStats,
        AsyncEngine,
        Delta,
        Engine,
        EngineError,
        Generation,
        QueueFullError,
        Request,
    )
    from jaxspec.engine.load import generate, load
    from jaxspec.sampling import SamplingParams

__all__ = [
    "AcceptanceStats",
    "AsyncEngine",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Generation",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "generate",
    "list_configs",
    "load",
]

# Where a name is looked for, in this order. JAX and flax are imported when something needs them; who reads
# a configuration or a checkpoint does not.
_MODULES = ("config", "checkpoints", "sampling", "engine.load", "engine")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"jaxspec.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
