"""Where arrays lie: logical axes to mesh axes, by one table. One device is a mesh of one."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import AXIS_TO_MESH, ConfigError


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh of the first `num_devices` devices, with the axis that `config.AXIS_TO_MESH` names.

    Raises:
      ConfigError: there are not so many devices.
    """
    devices = jax.devices()
    if num_devices > len(devices):
        raise ConfigError(f"engine.tensor_parallel is {num_devices}, and jax sees {len(devices)} devices")
    return Mesh(np.asarray(devices[:num_devices]), ("model",))


def sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array with these logical axes.

    An axis that does not divide evenly stays whole: a model with three key/value heads on two devices
    keeps its attention on both.
    """
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        over = AXIS_TO_MESH[axis] if axis is not None else None
        spec.append(over if over is not None and size % mesh.shape[over] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
