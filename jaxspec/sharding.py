"""Where arrays lie, and programs that run on every device's part of them. One device is a mesh of one.

Logical axes go to mesh axes by one table. A program over several devices runs inside one `jax.shard_map`
(`on_shards`), kernels and all: it computes with what its device has, and nothing moves between devices but
what these functions move. Code inside tells a part from a whole by its shape; on one device every part is the
whole, and none of them does anything.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import AXIS_TO_MESH, AXIS_UNIT, MESH_AXIS, ConfigError


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh of the first `num_devices` devices, with the axis that `config.AXIS_TO_MESH` names.

    Raises:
      ConfigError: there are not so many devices.
    """
    devices = jax.devices()
    if num_devices > len(devices):
        raise ConfigError(f"engine.tensor_parallel is {num_devices}, and jax sees {len(devices)} devices")
    return Mesh(np.asarray(devices[:num_devices]), (MESH_AXIS,))


def sharding(mesh: Mesh, axes: tuple[str | None, ...] | None, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array with these logical axes; whole on every device for None.

    Of the axes that may be split, the first in the table's order that divides evenly is: a mesh axis splits
    one axis of an array. One that does not divide stays whole: a model with three key/value heads on two
    devices keeps its attention on both.
    """
    axes = axes or (None,) * len(shape)
    spec: list[str | None] = [None] * len(shape)
    for axis, over in AXIS_TO_MESH.items():
        for i in (i for i, name in enumerate(axes) if name == axis):
            if over in mesh.shape and over not in spec and divides(mesh.shape[over], axis, shape[i]):
                spec[i] = over
    return NamedSharding(mesh, PartitionSpec(*spec))


def divides(devices: int, axis: str, size: int) -> bool:
    """Whether a logical axis of this size divides over so many devices."""
    return size % (devices * AXIS_UNIT.get(axis, 1)) == 0


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(tree: Any) -> Any:
    """Where the arrays of a tree lie; of shapes with a sharding as well."""
    return jax.tree.map(lambda array: array.sharding, tree)


def bytes_by_device(array: jax.Array) -> int:
    """Bytes of an array that one device has."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def on_shards(
    program: Callable[..., Any], mesh: Mesh, places: tuple[Any, ...], out: Any
) -> Callable[..., Any]:
    """`program` as one that takes and returns whole arrays, and itself sees what a device has of each.

    This is the only way to a program over several devices. Kernels cannot be split by XLA, so none runs
    outside of it. With one device the program is returned as it is.

    Args:
      places: a sharding for every array of every argument, or for all arrays of one.
      out: of the results. What is whole on every device must be the same on all.
    """
    if mesh.size == 1:
        return program

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, tree)

    # Kernels say nothing of which of their results are the same on all devices, so JAX cannot check it.
    return jax.shard_map(program, mesh=mesh, in_specs=specs(places), out_specs=specs(out), check_vma=False)


def split_over(part: int, whole: int) -> str | None:
    """The mesh axis that an axis is split over, of which this device has `part`; None where that is all."""
    return None if part == whole else MESH_AXIS


def all_sum(x: jax.Array, axis: str | None) -> jax.Array:
    """The sum of x over the devices of a mesh axis; x for None."""
    return x if axis is None else lax.psum(x, axis)


def all_parts(x: jax.Array, axis: str | None) -> jax.Array:
    """All devices' x side by side in the last axis; x for None."""
    return x if axis is None else lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def own_part(x: jax.Array, part: int, *, along: int = 0) -> jax.Array:
    """This device's `part` of an array that is whole on every device."""
    if x.shape[along] == part:
        return x
    return lax.dynamic_slice_in_dim(x, first_of(part), part, axis=along)


def first_of(part: int) -> jax.Array:
    """i32[], where this device's part of so many begins in a split axis."""
    return lax.axis_index(MESH_AXIS) * part


def once(x: jax.Array, axis: str | None) -> jax.Array:
    """x on the first device and zeros on the others, for what is added to parts of a sum; x for None."""
    return x if axis is None else jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
