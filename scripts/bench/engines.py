"""Engines over networks with random weights."""

import argparse
import json
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxspec
from bench.shapes import Shape, build_models
from jaxspec.config import EngineConfig
from jaxspec.drafters.base import Drafter
from jaxspec.engine import Engine
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.sharding import make_mesh


def build_engine(
    shape: Shape,
    config: EngineConfig,
    *,
    num_drafts: int = 0,
    drafter: Drafter | None = None,
    **settings: Any,
) -> Engine:
    """An engine with random weights of a shape.

    Args:
      shape: target and drafter.
      config: sizes of the engine and the number of devices.
      num_drafts: K of the shape's drafter; 0 for none.
      drafter: one without weights, in its place.
      **settings: further arguments of `Engine`.

    Raises:
      ConfigError: there are fewer devices, or the configuration does not fit the shape.
    """
    dtype = jnp.dtype(config.dtype_on(jax.default_backend()))
    mesh = make_mesh(config.tensor_parallel)
    models = build_models(
        shape, num_drafts=num_drafts, dtype=dtype, mesh=mesh, activations=config.gpu_activations
    )
    with compilation_cache():
        return Engine(
            models.target,
            drafter or models.drafter,
            tokenizer=None,
            eos_token_ids=(),
            config=config,
            mesh=mesh,
            progress=False,
            **settings,
        )


def load_engine(
    model: str | Shape, sizes: Mapping[str, Any], drafter: Mapping[str, Any], **settings: Any
) -> Engine:
    """An engine of a configuration or a checkpoint, or with random weights of a shape.

    Args:
      sizes: fields of `EngineConfig`.
      drafter: as of `jaxspec.load`; for a shape "num_drafts" or "drafter" of `build_engine`.
      **settings: further arguments of either.

    Raises:
      ConfigError, CheckpointError: as `jaxspec.load` or `build_engine`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="synthetic_acceptance_length")
        if isinstance(model, str):
            return jaxspec.load(model, drafter=dict(drafter), progress=False, **sizes, **settings)
        return build_engine(model, EngineConfig(**sizes), **drafter, **settings)


def add_engine_option(parser: argparse.ArgumentParser) -> None:
    """Adds --engine NAME=VALUE, which may be repeated; `engine` is a list of names and values."""
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="another field of the engine's configuration, as JSON",
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in EngineConfig.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE for a field of EngineConfig")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
