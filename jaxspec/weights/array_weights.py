"""Weights that are arrays in memory: trees of them, checks, and how they become parameters on the device.

Arrays of JAX never pass through the host. Parameters of one kind, such as a projection of all layers, are
converted a batch at a time, so that beside the caller's arrays and the network's there is never more than
`BATCH_BYTES`, or one larger parameter.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxspec.files import CheckpointError, TensorSource
from jaxspec.sharding import entering, replicated
from jaxspec.weights.finite import is_finite
from jaxspec.weights.memory import ArrayTensor, in_order
from jaxspec.weights.parameters import Source, Whole

Parameters = list[tuple[nnx.Variable, list[TensorSource]]]

BATCH_BYTES = 512 << 20


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
    return {path: entering(leaf) if isinstance(leaf, jax.Array) else leaf for path, leaf in leaves.items()}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, np.ndarray | jax.Array):  # most are, and asking flax takes longer
        yield ".".join(path), node
        return
    if isinstance(node, nnx.Variable):
        node = array_of(node)
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


def array_of(variable: nnx.Variable) -> Any:
    """`get_value`, which takes longer than all else that an update asks about a parameter."""
    value = variable.get_raw_value()
    is_all = isinstance(value, jax.Array) and "on_get_value" not in variable.get_metadata()
    return value if is_all else variable.get_value()


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
        own, given = array_of(variable), arrays.get(path)
        if given is None:
            raise CheckpointError(f"weights: {path!r} is missing; expected shape {list(own.shape)}")
        if tuple(given.shape) != tuple(own.shape):
            raise CheckpointError(
                f"weights: {path!r} has shape {list(given.shape)}, expected {list(own.shape)}"
            )
        kinds = {jnp.issubdtype(dtype, jnp.floating) for dtype in {given.dtype, own.dtype}}
        if len(kinds) > 1:
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


def are_gone(stored: Sequence[TensorSource]) -> bool:
    """Whether one of these tensors is an array that has been donated or deleted."""
    return any(array.is_deleted() for array in _jax_arrays(stored))


def check_there(parameters: Parameters) -> None:
    """Checks that no array has been donated or deleted.

    Raises:
      CheckpointError: one has.
    """
    for variable, stored in parameters:
        if are_gone(stored):
            name = variable.get_metadata("source").tensors[0][0]
            raise CheckpointError(f"weights: an array of {name!r} has been donated or deleted")


def finite_check(parameters: Parameters) -> Callable[[], None]:
    """Begins to check arrays for NaN and infinity where they are.

    Returns:
      A function that waits for the result; it raises CheckpointError if an array holds some.

    Raises:
      CheckpointError: an array has been donated or deleted.
    """
    check_there(parameters)
    bad: list[str] = []
    # One program for all arrays of a mesh: hundreds of small ones would cost the host more than the device.
    by_place: dict[Any, dict[int, tuple[str, jax.Array]]] = {}
    for variable, stored in parameters:
        source: Source = variable.get_metadata("source")
        if source.kind != "float":
            continue
        for (name, _), tensor in zip(source.tensors, stored, strict=False):
            if not isinstance(tensor, ArrayTensor):
                continue
            if not isinstance(tensor.array, jax.Array):
                bad += [] if is_finite(tensor.read()) else [name]
                continue
            own = tensor.array.sharding
            place = own.mesh if isinstance(own, NamedSharding) else frozenset(own.device_set)
            by_place.setdefault(place, {})[id(tensor.array)] = name, tensor.array
    begun = []
    for named in by_place.values():
        names, arrays = zip(*named.values(), strict=True)
        begun.append((names, _are_finite(arrays)))

    def wait() -> None:
        for names, are_finite in begun:
            bad.extend(name for name, ok in zip(names, np.asarray(are_finite), strict=True) if not ok)
        if bad:
            raise CheckpointError(f"weights: tensor {bad[0]!r} holds NaN or infinity")

    return wait


@jax.jit
def _are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How tensors become a parameter; equal ones, such as those of all layers, share their programs.

    Attributes:
      source: without names.
      axes: the order of each tensor's axes.
      dtype, place: of the parameter.
    """

    source: Source
    axes: tuple[Any, ...]
    dtype: np.dtype
    place: Sharding

    @staticmethod
    def of(variable: nnx.Variable, stored: Sequence[TensorSource], place: Sharding) -> "Conversion":
        """That of a parameter whose tensors are arrays of JAX."""
        axes = tuple(tensor.axes for tensor in stored if isinstance(tensor, ArrayTensor))
        source: Any = source_of(variable, stored)
        return Conversion(_unnamed(source), axes, np.dtype(array_of(variable).dtype), place)

    def __call__(
        self, every: Sequence[Sequence[TensorSource]], into: Sequence[jax.Array | None] | None = None
    ) -> list[jax.Array]:
        """Parameters in one program.

        Args:
          every: the tensors of each.
          into: arrays like the parameters, whose memory these take; they are donated.
        """
        tensors = [[tensor for tensor in stored if isinstance(tensor, ArrayTensor)] for stored in every]
        arrays = [[_near(tensor.value(), self.place) for tensor in stored] for stored in tensors]
        parameters: list[jax.Array] = _program(self)(into or [None] * len(arrays), arrays)
        given = {id(tensor.array) for stored in tensors for tensor in stored}
        if not given.issuperset(id(array) for own in arrays for array in own):
            jax.block_until_ready(parameters)  # so that there are never copies for more than one program
        return parameters


@lru_cache(maxsize=4096)
def _program(conversion: Conversion) -> Any:
    def convert(arrays: Sequence[jax.Array]) -> jax.Array:
        tensors = [in_order(array, axes) for array, axes in zip(arrays, conversion.axes, strict=True)]
        # A copy even if nothing changes: the caller may donate its arrays to its next training step.
        return conversion.source.join(tensors).astype(conversion.dtype)

    def run(into: list[jax.Array | None], every: list[list[jax.Array]]) -> list[jax.Array]:
        return [convert(arrays) for arrays in every]

    return jax.jit(run, donate_argnums=0, keep_unused=True, out_shardings=conversion.place)


@lru_cache(maxsize=4096)
def _unnamed(source: Any) -> Any:
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(source):
        value = getattr(source, each.name)
        if each.name == "name":
            changes["name"] = ""
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            changes[each.name] = tuple(map(_unnamed, value))
    return dataclasses.replace(source, **changes)


def _near(array: jax.Array, place: Sharding) -> jax.Array:
    """The array on the devices of `place`; as it is if it is there, however it is split."""
    own = array.sharding
    if own.memory_kind == place.memory_kind and _in_order_of(own) == _in_order_of(place) != ():
        return array
    mesh = getattr(place, "mesh", None)
    return jax.device_put(array, place if mesh is None else replicated(mesh))


def _in_order_of(sharding: Sharding) -> tuple[jax.Device, ...]:
    """The devices of a sharding in their order; empty where that is not public."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set) if len(sharding.device_set) == 1 else ()


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Parameters that are written at once.

    Attributes:
      conversion: of all of them, whose tensors are arrays of JAX; None for one that comes from the host.
    """

    conversion: Conversion | None
    parameters: Parameters

    def read(self, into: Sequence[jax.Array]) -> list[jax.Array]:
        """The new arrays; frees the memory of these, or takes it."""
        if not self.parameters:
            return []
        if self.conversion is not None:
            return self.conversion([stored for _, stored in self.parameters], into)
        ((variable, stored),), (old,) = self.parameters, into
        new = from_host(source_of(variable, stored), [tensor.read() for tensor in stored], old)
        jax.block_until_ready(new)
        old.delete()
        return [new]


def batches(parameters: Parameters) -> list[Batch]:
    """Parameters that have arrays, those of one kind together."""
    found: list[Batch] = []
    alike: dict[Conversion, Parameters] = {}
    for variable, stored in parameters:
        if on_device(stored):
            conversion = Conversion.of(variable, stored, array_of(variable).sharding)
            alike.setdefault(conversion, []).append((variable, stored))
        else:
            found.append(Batch(None, [(variable, stored)]))
    for conversion, same in alike.items():
        count = max(BATCH_BYTES // max(array_of(same[0][0]).nbytes, 1), 1)
        found += [Batch(conversion, same[i : i + count]) for i in range(0, len(same), count)]
    return found


def overwrite(every: Sequence[Batch]) -> dict[int, jax.Array]:
    """Puts new values into the places of the parameters' arrays, one batch after another.

    The device may still be busy with it afterwards.

    Returns:
      The new array of every old one's `id`.

    Raises:
      CheckpointError: an array has been deleted since, or is another parameter's; nothing is written then.
    """
    check_there([parameter for batch in every for parameter in batch.parameters])
    every = [
        Batch(batch.conversion, [each for each in batch.parameters if not _is_kept(each)]) for batch in every
    ]
    shared = _in_own_memory([parameter for batch in every for parameter in batch.parameters])
    replaced: dict[int, jax.Array] = {}
    for batch in _with_copies(every, shared):
        old = [array_of(variable) for variable, _ in batch.parameters]
        for (variable, _), before, after in zip(batch.parameters, old, batch.read(old), strict=True):
            variable.set_value(after)
            replaced[id(before)] = after
    return replaced


def _with_copies(every: Sequence[Batch], shared: Collection[int]) -> Iterator[Batch]:
    """The batches; what would be read while it is overwritten is copied, one parameter after another."""
    for batch in every:
        for variable, stored in batch.parameters:
            if id(variable) in shared:
                yield Batch(batch.conversion, [(variable, list(map(_copied, stored)))])
                jax.block_until_ready(array_of(variable))  # which frees the copy
        yield Batch(batch.conversion, [each for each in batch.parameters if id(each[0]) not in shared])


def _in_own_memory(parameters: Parameters) -> set[int]:
    """The `id` of each variable whose new value lies in the memory of its old one.

    Raises:
      CheckpointError: a new value lies in the memory of another parameter, which may be overwritten first.
    """
    owners: dict[int, list[nnx.Variable]] = {}
    for variable, _ in parameters:
        for pointer in _pointers(array_of(variable)):
            owners.setdefault(pointer, []).append(variable)
    own = set()
    for variable, stored in parameters:
        for pointer in (pointer for array in _jax_arrays(stored) for pointer in _pointers(array)):
            of = owners.get(pointer, [])
            if any(each is variable for each in of):
                own.add(id(variable))
            elif of:
                name, other = (each.get_metadata("source").tensors[0][0] for each in (variable, of[0]))
                raise CheckpointError(
                    f"weights: the array of {name!r} is the engine's own of {other!r}, which is overwritten; "
                    "pass a copy"
                )
    return own


def _is_kept(parameter: tuple[nnx.Variable, list[TensorSource]]) -> bool:
    """Whether a parameter's new array is its present one."""
    variable, stored = parameter
    return isinstance(stored[0], WholeParameter) and stored[0].array is array_of(variable)


def _copied(tensor: TensorSource) -> TensorSource:
    if not isinstance(tensor, ArrayTensor):
        return tensor
    return dataclasses.replace(tensor, array=jnp.copy(tensor.array))


def _jax_arrays(stored: Sequence[TensorSource]) -> list[jax.Array]:
    return [t.array for t in stored if isinstance(t, ArrayTensor) and isinstance(t.array, jax.Array)]


def from_host(source: Source, tensors: Sequence[np.ndarray], like: Any) -> jax.Array:
    """A parameter from arrays of NumPy, with the shape, dtype and sharding of `like`."""

    def part(index: Any) -> np.ndarray:
        """A device's part, as a new array and never a view of the tensors."""
        part = np.ascontiguousarray(source.join(tensors, index), like.dtype)
        return part.copy() if any(np.may_share_memory(part, tensor) for tensor in tensors) else part

    return jax.make_array_from_callback(like.shape, like.sharding, part)


def _pointers(array: Any) -> list[int]:
    """The addresses of an array's parts: arrays with a common one share memory."""
    if not isinstance(array, jax.Array) or not array.size:
        return []
    if len(array.sharding.device_set) == 1:
        return [array.unsafe_buffer_pointer()]
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
