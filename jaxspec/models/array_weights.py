"""Weights that are arrays in memory: trees of them, checks, and how they become parameters on the device.

Arrays of JAX never pass through the host. A parameter is converted by a program of its own, so that beside
the caller's arrays and the network's there is never more than one parameter.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxspec.checkpoints import CheckpointError, TensorSource
from jaxspec.checkpoints.finite import is_finite
from jaxspec.checkpoints.memory import ArrayTensor, in_order
from jaxspec.models.parameters import Source, Whole
from jaxspec.sharding import replicated

Parameters = list[tuple[nnx.Variable, list[TensorSource]]]


@dataclasses.dataclass(frozen=True, eq=False)
class WholeParameter(ArrayTensor):
    """A parameter as a network holds it, not as a checkpoint stores it."""


def flatten(tree: Any) -> dict[str, Any]:
    """The arrays of a tree of any depth by their paths, joined by dots.

    Args:
      tree: mappings, sequences, flax states and modules. A flax variable, and what orbax restores of one,
        `{"value": array}`, is its array.

    Raises:
      CheckpointError: the tree is empty, or a leaf is not an array.
    """
    leaves = dict(_leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree, ()))
    if not leaves:
        raise CheckpointError(f"weights: expected a tree of arrays, got {type(tree).__name__} without any")
    for path, leaf in leaves.items():
        if not isinstance(leaf, np.ndarray | jax.Array):
            raise CheckpointError(
                f"weights: {path or 'the tree'!r} is not an array but {type(leaf).__name__}"
            )
    return leaves


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.Variable):
        node = node.get_value()
    if isinstance(node, Mapping) and path and set(node) == {"value"}:
        node = node["value"]
    if isinstance(node, Mapping):
        children: Any = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    else:
        yield ".".join(path), node
        return
    for key, child in children:
        yield from _leaves(child, (*path, str(key)))


_VARIABLES: WeakKeyDictionary[nnx.Module, dict[str, nnx.Variable]] = WeakKeyDictionary()
"""What `variables` has returned, by module: a loaded network keeps the same variables for its whole life."""


def variables(module: nnx.Module) -> dict[str, nnx.Variable]:
    """A module's parameters and buffers by their paths, as in `flatten`."""
    if module not in _VARIABLES:
        found = nnx.iter_graph(module)
        _VARIABLES[module] = {
            ".".join(map(str, path)): node for path, node in found if isinstance(node, nnx.Variable)
        }
    return _VARIABLES[module]


def whole_parameters(module: nnx.Module, arrays: Mapping[str, Any]) -> Parameters:
    """Finds every parameter of a module among the leaves of its own tree.

    Raises:
      CheckpointError: a leaf is missing, unexpected, of another shape or of another kind of dtype.
    """
    parameters: Parameters = []
    known = variables(module)
    for path, variable in known.items():
        own, given = variable.get_value(), arrays.get(path)
        if given is None:
            raise CheckpointError(f"weights: {path!r} is missing; expected shape {list(own.shape)}")
        if tuple(given.shape) != tuple(own.shape):
            raise CheckpointError(
                f"weights: {path!r} has shape {list(given.shape)}, expected {list(own.shape)}"
            )
        if jnp.issubdtype(given.dtype, jnp.floating) != jnp.issubdtype(own.dtype, jnp.floating):
            raise CheckpointError(f"weights: {path!r} is {given.dtype}, expected {own.dtype}")
        parameters.append((variable, [WholeParameter(given)]))
    spare = sorted(set(arrays) - set(known))
    if spare:
        more = f" and {len(spare) - 1} more" if len(spare) > 1 else ""
        raise CheckpointError(
            f"weights: spare {spare[0]!r} of shape {list(arrays[spare[0]].shape)}{more}: "
            f"nothing in the model takes it"
        )
    return parameters


def source_of(variable: nnx.Variable, stored: Sequence[TensorSource]) -> Source:
    """How these tensors make up a parameter."""
    source: Source = variable.get_metadata("source")
    whole = isinstance(stored[0], WholeParameter)
    return Whole("", tuple(stored[0].shape)) if whole else source


def on_device(stored: Sequence[TensorSource]) -> bool:
    """Whether all of these tensors are arrays of JAX."""
    return all(isinstance(t, ArrayTensor) and isinstance(t.array, jax.Array) for t in stored)


def check_finite(parameters: Parameters) -> None:
    """Checks arrays for NaN and infinity where they are, and waits for the result.

    Raises:
      CheckpointError: an array holds some.
    """
    finite: dict[str, bool] = {}
    # One program for all arrays of a mesh: hundreds of small ones would cost the host more than the device.
    by_place: dict[Any, dict[str, jax.Array]] = {}
    for variable, stored in parameters:
        source: Source = variable.get_metadata("source")
        if source.kind != "float":
            continue
        for (name, _), tensor in zip(source.tensors, stored, strict=False):
            if not isinstance(tensor, ArrayTensor):
                continue
            if not isinstance(tensor.array, jax.Array):
                finite[name] = is_finite(tensor.read())
                continue
            own = tensor.array.sharding
            place = own.mesh if isinstance(own, NamedSharding) else frozenset(own.device_set)
            by_place.setdefault(place, {})[name] = tensor.array
    for arrays in by_place.values():
        finite.update(zip(arrays, np.asarray(_are_finite([*arrays.values()])).tolist(), strict=True))
    bad = next((name for name, ok in finite.items() if not ok), None)
    if bad is not None:
        raise CheckpointError(f"weights: tensor {bad!r} holds NaN or infinity")


@jax.jit
def _are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def convert(
    source: Source,
    stored: Sequence[TensorSource],
    dtype: jnp.dtype,
    place: NamedSharding,
    into: jax.Array | None = None,
) -> jax.Array:
    """A parameter from arrays of JAX.

    Args:
      source, stored: how it is stored, and its tensors, of which `on_device` is true.
      dtype, place: of the result.
      into: an array of the same shape, dtype and place whose memory the result takes; it is donated.
    """
    tensors = [tensor for tensor in stored if isinstance(tensor, ArrayTensor)]
    program = _program(_unnamed(source), tuple(t.axes for t in tensors), jnp.dtype(dtype), place)
    return program(into, *(_near(tensor.value(), place) for tensor in tensors))


@lru_cache(maxsize=4096)
def _program(source: Source, axes: tuple[Any, ...], dtype: np.dtype, place: NamedSharding) -> Any:
    """One program for all layers, whose sources differ only in their names."""

    def run(into: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        tensors = [in_order(array, order) for array, order in zip(arrays, axes, strict=True)]
        # A copy even if nothing changes: the caller may donate its arrays to its next training step.
        return source.join(tensors).astype(dtype)

    return jax.jit(run, donate_argnums=0, keep_unused=True, out_shardings=place)


def _unnamed(source: Any) -> Any:
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(source):
        value = getattr(source, each.name)
        if each.name == "name":
            changes["name"] = ""
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            changes[each.name] = tuple(map(_unnamed, value))
    return dataclasses.replace(source, **changes)


def _near(array: jax.Array, place: NamedSharding) -> jax.Array:
    """The array on the devices of `place`; as it is if it is there, however it is split."""
    assert isinstance(place.mesh, Mesh)
    own, devices = array.sharding, tuple(place.mesh.devices.flat)
    if own.memory_kind == place.memory_kind:
        if isinstance(own, NamedSharding) and tuple(own.mesh.devices.flat) == devices:
            if set(own.mesh.axis_types) <= {AxisType.Auto}:
                return array
            # JAX would not let a program reshape an array whose mesh is explicit.
            mesh = Mesh(own.mesh.devices, own.mesh.axis_names)
            return jax.device_put(array, NamedSharding(mesh, own.spec))
        if len(devices) == 1 and own.device_set == set(devices):
            return array
    return jax.device_put(array, replicated(place.mesh))


def overwrite(every: Sequence[Parameters]) -> dict[int, jax.Array]:
    """Puts new values into the places of the parameters' arrays, one parameter after another.

    Args:
      every: parameters that have arrays, with their tensors. Earlier groups are written first.

    Returns:
      The new array of every old one's `id`.

    Raises:
      CheckpointError: an array has been deleted since; nothing has been written then.
    """
    parameters = [parameter for group in every for parameter in group]
    held = set[Any]().union(*(_pointers(variable.get_value()) for variable, _ in parameters))
    to_do: Parameters = []
    replaced: dict[int, jax.Array] = {}
    for variable, stored in parameters:
        arrays = [t.array for t in stored if isinstance(t, ArrayTensor) and isinstance(t.array, jax.Array)]
        if any(array.is_deleted() for array in arrays):
            name = variable.get_metadata("source").tensors[0][0]
            raise CheckpointError(f"weights: an array of {name!r} has been donated or deleted")
        if isinstance(stored[0], WholeParameter) and stored[0].array is variable.get_value():
            replaced[id(stored[0].array)] = stored[0].array
            continue
        # What shares memory with an array that is about to be donated is copied before.
        stored = [
            dataclasses.replace(tensor, array=jnp.copy(tensor.array))
            if isinstance(tensor, ArrayTensor) and _pointers(tensor.array) & held
            else tensor
            for tensor in stored
        ]
        to_do.append((variable, stored))
    for variable, stored in to_do:
        old, source = variable.get_value(), source_of(variable, stored)
        if on_device(stored):
            new = convert(source, stored, old.dtype, old.sharding, old)
        else:
            new = from_host(source, [tensor.read() for tensor in stored], old)
            jax.block_until_ready(new)
            old.delete()
        variable.set_value(new)
        replaced[id(old)] = new
    return replaced


def from_host(source: Source, tensors: Sequence[np.ndarray], like: Any) -> jax.Array:
    """A parameter from arrays of NumPy, with the shape, dtype and sharding of `like`."""

    def part(index: Any) -> np.ndarray:
        """A device's part, as a new array and never a view of the tensors."""
        part = np.ascontiguousarray(source.join(tensors, index), like.dtype)
        return part.copy() if any(np.may_share_memory(part, tensor) for tensor in tensors) else part

    return jax.make_array_from_callback(like.shape, like.sharding, part)


def _pointers(array: Any) -> set[tuple[jax.Device, int]]:
    """Where an array's parts are: arrays with the same place share memory."""
    arrays = [leaf for leaf in jax.tree.leaves(array) if isinstance(leaf, jax.Array)]
    shards = [(shard.device, shard.data) for leaf in arrays for shard in leaf.addressable_shards]
    return {(device, data.unsafe_buffer_pointer()) for device, data in shards if data.size}
