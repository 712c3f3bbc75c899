"""Loads the drafter that a configuration names, or places one that was made in Python."""

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxspec.config import DrafterConfig, ModelConfig
from jaxspec.drafters.base import Build, Drafter, DrafterReader, Target
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.jax_settings import own_settings
from jaxspec.sharding import sharding


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


def place_drafter(drafter: Drafter, mesh: Mesh) -> Drafter:
    """A copy of a drafter that was made in Python, with its arrays on the devices of `mesh`.

    Parameters that declare axes are split along them, as those of a checkpoint are; the others are whole.
    """
    graph, state = nnx.split(drafter)
    placed = []
    for path, variable in nnx.to_flat_state(state):
        array = variable.get_value()
        axes = variable.get_metadata().get("axes") if drafter.needs.is_split else None
        placed.append((path, variable.replace(jax.device_put(array, sharding(mesh, axes, array.shape)))))
    return nnx.merge(graph, nnx.from_flat_state(placed))
