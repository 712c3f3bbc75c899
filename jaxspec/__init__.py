"""Speculative decoding for JAX: draft, verify and emit in one compiled step."""

from jaxspec.checkpoints import CheckpointError
from jaxspec.config import ConfigError, DrafterConfig, EngineConfig, list_configs
from jaxspec.drafters.registry import register_drafter
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
from jaxspec.inspection import inspect_steps
from jaxspec.lossless import check_lossless
from jaxspec.models.registry import register_family
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
    "check_lossless",
    "generate",
    "inspect_steps",
    "list_configs",
    "load",
    "register_drafter",
    "register_family",
]
