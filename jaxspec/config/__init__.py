"""Frozen configurations, read from TOML files and Hugging Face `config.json`; and the axis glossary."""

from jaxspec.config.axes import AXIS_TO_MESH, AXIS_UNIT, MESH_AXIS
from jaxspec.config.drafter import DrafterConfig
from jaxspec.config.engine import EngineConfig, EngineOptions, ResolvedEngineConfig
from jaxspec.config.errors import ConfigError
from jaxspec.config.keys import Keys, check_keys, inner_keys, joined, own_values
from jaxspec.config.model import ModelConfig
from jaxspec.config.moe import MoeConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.config.sections import build_section
from jaxspec.config.toml import (
    DEFAULT_MODEL,
    Config,
    SourceConfig,
    check_source,
    is_configuration,
    list_configs,
    load_config,
    named_drafter,
    named_target,
    resolve_config,
)

__all__ = [
    "AXIS_TO_MESH",
    "AXIS_UNIT",
    "DEFAULT_MODEL",
    "MESH_AXIS",
    "Config",
    "ConfigError",
    "DrafterConfig",
    "EngineConfig",
    "EngineOptions",
    "Keys",
    "ModelConfig",
    "MoeConfig",
    "ResolvedEngineConfig",
    "RopeConfig",
    "SourceConfig",
    "build_section",
    "check_keys",
    "check_source",
    "inner_keys",
    "is_configuration",
    "joined",
    "list_configs",
    "load_config",
    "named_drafter",
    "named_target",
    "own_values",
    "resolve_config",
]
