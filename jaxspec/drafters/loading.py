"""Loads the drafter that a configuration names."""

from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Drafter, DrafterReader, Target
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.jax_settings import own_settings


@own_settings()
def load_drafter(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    """The drafter that `config` names, with its weights.

    Raises:
      ConfigError: the drafter does not fit the target.
      CheckpointError: its checkpoint cannot be read, or a tensor is missing, unexpected or of another shape.
    """
    return plan_drafter(config, target.config, build)(target)


def plan_drafter(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    """`load_drafter` without reading the weights; raises the same errors."""
    return DRAFTERS[config.kind].plan(config, target, build)
