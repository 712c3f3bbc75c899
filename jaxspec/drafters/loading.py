"""From a configuration to a drafter with its weights."""

from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Drafter, DrafterReader, Target
from jaxspec.drafters.registry import KINDS


def load_drafter(config: DrafterConfig, target: Target, build: Build) -> Drafter:
    """The drafter that `config` names, with its weights.

    Raises:
      ConfigError: it does not fit the target.
      CheckpointError: its checkpoint cannot be read, or holds other tensors than it should.
    """
    return plan_drafter(config, target.config, build)(target)


def plan_drafter(config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
    """`load_drafter` up to the point where it would read weights; raises the same."""
    return KINDS[config.kind].plan(config, target, build)
