"""Sharding of arrays, and programs over several devices. A single device is a mesh of one.

One table (`config.AXIS_TO_MESH`) maps logical axes to mesh axes. A program over several devices runs inside
one `jax.shard_map` (`on_shards`), including its kernels: it computes with its device's part of every array,
and data moves between devices only by the functions below. The code inside tells by its shape whether an
array is a part or whole; on one device every array is whole, and these functions return their argument.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxspec_kernels import collectives
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.rms_norm import add_rms_norm

from jaxspec.config import AXIS_TO_MESH, AXIS_UNIT, MESH_AXIS
from jaxspec.jax_settings import Device, choose_devices, own_settings


def make_mesh(num_devices: int = 1, device: Device | None = None) -> Mesh:
    """A mesh of `num_devices` devices of this process, with the axis `config.MESH_AXIS`.

    Args:
      num_devices: how many.
      device: which ones; see `choose_devices`.

    Raises:
      ConfigError: there are fewer devices, or others cannot be named so.
    """
    return Mesh(np.asarray(choose_devices(device, num_devices)), (MESH_AXIS,))


def sharding(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...] | None, shape: tuple[int, ...]
) -> Sharding:
    """The sharding of an array with these logical axes; see `partition`."""
    return placed(mesh, partition(mesh, axes, shape))


def placed(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Sharding:
    """The sharding of an array that is split over a mesh as `spec` says.

    On one device it names no mesh, so that programs with an explicit mesh of their own can compute with the
    array: JAX refuses those of another mesh there.
    """
    if isinstance(mesh, Mesh) and mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    return NamedSharding(mesh, spec)


def partition(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...] | None, shape: tuple[int, ...]
) -> PartitionSpec:
    """How an array with these logical axes is split; None keeps it whole.

    A mesh axis splits one axis of the array: the first in the order of `config.AXIS_TO_MESH` that divides
    evenly. If none does, the array is replicated: with three key/value heads on two devices, both hold all of
    attention. (For fewer heads than devices see `ModelConfig.over`.)

    Args:
      mesh: the devices.
      axes: the logical axis of every axis of the array, or None for one that is not split.
      shape: of the whole array.
    """
    axes = axes or (None,) * len(shape)
    spec: list[str | None] = [None] * len(shape)
    for axis, over in AXIS_TO_MESH.items():
        for i in (i for i, name in enumerate(axes) if name == axis):
            if over in mesh.shape and over not in spec and divides(mesh.shape[over], axis, shape[i]):
                spec[i] = over
    return PartitionSpec(*spec)


def divides(devices: int, axis: str, size: int) -> bool:
    """Whether a logical axis of this size can be split evenly over so many devices."""
    return size % (devices * AXIS_UNIT.get(axis, 1)) == 0


def replicated(mesh: Mesh | AbstractMesh) -> Sharding:
    """The sharding of an array that is whole on every device."""
    return placed(mesh, PartitionSpec())


def entering(array: jax.Array) -> jax.Array:
    """A caller's array without its mesh, so that our programs can take it; nothing is copied.

    JAX may compute with an array of an explicit mesh only under that mesh, and may give the results of a
    program the mesh of its arguments.
    """
    own = array.sharding
    if not isinstance(own, NamedSharding) or array.is_deleted():
        return array
    assert isinstance(own.mesh, Mesh)
    if own.mesh.size > 1 and set(own.mesh.axis_types) <= {AxisType.Auto}:
        return array
    mesh = Mesh(own.mesh.devices, own.mesh.axis_names)
    place = placed(mesh, own.spec)
    return jax.device_put(array, place.with_memory_kind(own.memory_kind) if own.memory_kind else place)


def leaving(array: np.ndarray, device: jax.Device) -> jax.Array:
    """An array for the caller's program, as `jnp.asarray` would make it on this device.

    It is not committed to the device, so JAX computes with it beside arrays of any device or mesh, and
    under any mesh.
    """
    with own_settings(device):
        return jnp.asarray(array)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of arrays or `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda array: array.sharding, tree)


def bytes_by_device(array: jax.Array) -> int:
    """Bytes of one device's part of an array."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def on_shards(
    program: Callable[..., Any], mesh: Mesh, places: tuple[Any, ...], out: Any
) -> Callable[..., Any]:
    """Wraps a program that runs on each device's parts of arrays as one that takes and returns whole arrays.

    Every program over several devices is made here, because XLA cannot split our kernels. On a mesh of one
    device the program is returned unchanged.

    Args:
      program: runs on every device; calls to `psum` and others move data between devices.
      mesh: the devices.
      places: the shardings of the arguments, one for each array or one for all arrays of an argument.
      out: the shardings of the results. A replicated result must be equal on all devices.
    """
    if mesh.size == 1:
        return program

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, tree)

    def whole(*arguments: Any) -> Any:
        results: list[Any] = []

        def on_device(*parts: Any) -> Any:
            results.append(program(*_emptied(parts, arguments)))
            return _filled(results[0], mesh.size)

        # JAX cannot check which results of kernels are equal on all devices.
        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=specs(places), out_specs=specs(out), check_vma=False
        )
        return _emptied(mapped(*_filled(arguments, mesh.size)), results[0])

    return whole


def _filled(tree: Any, size: int) -> Any:
    """The arrays of a tree, those without elements with axes of this size in place of empty ones.

    XLA of jax 0.11.2 (not 0.11.1 or 0.12.0) removes arrays without elements that enter or leave a program on
    shards, but not their shardings, and dies while it compiles such a program.
    """
    return jax.tree.map(
        lambda x: x if x.size else jnp.zeros([length or size for length in x.shape], x.dtype), tree
    )


def _emptied(tree: Any, like: Any) -> Any:
    """The inverse of `_filled`; `like` has the axes that are empty."""

    def emptied(x: jax.Array, shape: jax.Array) -> jax.Array:
        return x if shape.size else x[tuple(slice(None if n else 0) for n in shape.shape)]

    return jax.tree.map(emptied, tree, like)


def split_over(part: int, whole: int) -> str | None:
    """The mesh axis over which an axis of size `whole` is split; None if `part`, this device's, is all."""
    return None if part == whole else MESH_AXIS


def num_parts() -> int:
    """The number of devices that this program runs on, and so of parts of an array that is split."""
    try:
        return lax.axis_size(MESH_AXIS)
    except NameError:  # not inside `on_shards`
        return 1


def psum(x: jax.Array, axis: str | None) -> jax.Array:
    """The sum of x over the devices of a mesh axis; x if the axis is None."""
    return x if axis is None else collectives.psum(x, axis)


def later_psum(x: jax.Array, axis: str | None) -> "jax.Array | PendingSum":
    """Like `psum`, but the sum is pending; x if the axis is None."""
    return x if axis is None else PendingSum(x, axis)


def later_add(stream: "jax.Array | PendingSum", term: "jax.Array | PendingSum") -> "jax.Array | PendingSum":
    """`stream + term`, which is pending if a kernel can compute it together with its norm."""
    if isinstance(term, PendingSum) or not is_exact():
        return stream + term
    return PendingSum(term, None, stream=total(stream))


def total(x: "jax.Array | PendingSum") -> jax.Array:
    """The value of a sum that may be pending."""
    return x.total() if isinstance(x, PendingSum) else x


@dataclass(eq=False)
class PendingSum:
    """The sum of a term over devices, plus arrays; computed when it is first needed.

    So two sums that are added become one; and the sum, what it is added to, and the norm of the result become
    one kernel on GPUs.

    Attributes:
      part: [N, M], this device's term.
      axis: the mesh axis to sum over; None on one device.
      bias: [M], added to the sum.
      stream: [N, M], to which sum and bias are added.
    """

    part: jax.Array
    axis: str | None
    bias: jax.Array | None = None
    stream: jax.Array | None = None
    _total: jax.Array | None = field(default=None, init=False)

    def __add__(self, other: "jax.Array | PendingSum") -> "jax.Array | PendingSum":
        if isinstance(other, PendingSum):
            for pending, term in ((self, other), (other, self)):
                if pending._total is None and term._is_bare:
                    return replace(pending, part=pending.part + term.part)
            return self.total() + other
        if self._total is None and self.stream is None:
            if other.ndim == 1 and self.bias is None:
                return replace(self, bias=other)
            if other.shape == self.part.shape:
                return replace(self, stream=other)
        return self.total() + other

    __radd__ = __add__

    def __mul__(self, factor: float) -> "jax.Array | PendingSum":
        if self._total is not None or self.stream is not None:
            return self.total() * factor
        bias = None if self.bias is None else self.bias * factor
        return replace(self, part=self.part * factor, bias=bias)

    @property
    def _is_bare(self) -> bool:
        return self._total is None and self.bias is None and self.stream is None

    def total(self) -> jax.Array:
        """The value, [N, M]."""
        if self._total is None:
            value = psum(self.part, self.axis)
            value = value if self.bias is None else value + self.bias
            self._total = value if self.stream is None else self.stream + value
        return self._total

    def normed(self, factors: jax.Array, eps: float) -> jax.Array | None:
        """The root-mean-square norm of every row, [N, M], if the kernel of the sum can compute it too."""
        if self._total is not None or self.stream is None:
            return None
        both: tuple[jax.Array, jax.Array] | None
        if self.axis is None:
            both = add_rms_norm(self.part, self.stream, self.bias, factors, eps)
        else:
            both = collectives.psum_norm(self.part, self.stream, self.bias, factors, eps=eps)
        if both is None:
            return None
        self._total, normed = both
        return normed


def all_gather(x: jax.Array, axis: str | None) -> jax.Array:
    """x of all devices, concatenated along the last axis; x if the axis is None."""
    return x if axis is None else collectives.all_gather(x, axis, along=x.ndim - 1)


def local_part(x: jax.Array, part: int, *, along: int = 0) -> jax.Array:
    """This device's part, of size `part` along an axis, of a replicated array."""
    if x.shape[along] == part:
        return x
    return lax.dynamic_slice_in_dim(x, local_start(part), part, axis=along)


def local_start(part: int) -> jax.Array:
    """i32[]: the index at which this device's part of size `part` begins in a split axis."""
    return lax.axis_index(MESH_AXIS) * part


def on_first_device(x: jax.Array, axis: str | None) -> jax.Array:
    """x on the first device, zeros on the others: for terms added before `psum`. x if the axis is None."""
    return x if axis is None else jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
