"""Loads networks from checkpoints, and exports their weights."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxspec.config import MESH_AXIS
from jaxspec.files import Checkpoint, CheckpointError, StrictTensors, TensorSource
from jaxspec.jax_settings import own_settings
from jaxspec.sharding import make_mesh, partition, sharding
from jaxspec.weights.array_weights import (
    Conversion,
    Parameters,
    finite_check,
    flatten,
    from_host,
    on_device,
    source_of,
    variables,
    whole_parameters,
)
from jaxspec.weights.finite import is_finite
from jaxspec.weights.memory import Names, array_tensors
from jaxspec.weights.packed_weights import Activations, Packed, floats_of, packed_sharding, stored_weight
from jaxspec.weights.parameters import HeadRows, NoKeys, Rows, Source

Module = TypeVar("Module", bound=nnx.Module)

# Buffers that older versions of transformers saved with the weights.
IGNORED = (
    "*rotary_emb.inv_freq",
    "*rotary_pos_emb.inv_freq",
    "*rotary_emb.cos_cached",
    "*rotary_emb.sin_cached",
)

# Packing is bound by the processor, in NumPy, which lets other threads run.
_PACKED_AT_ONCE = 2


@dataclass(frozen=True)
class ModulePlan(Generic[Module]):
    """A module all of whose parameters were found in a checkpoint, but not read yet.

    Attributes:
      name: of the checkpoint, for error messages.
      module: holds shapes instead of arrays until `read`.
      parameters: each parameter, with the tensors that it is made of.
    """

    name: str
    module: Module
    parameters: Parameters

    def read(
        self,
        mesh: Mesh | None = None,
        *,
        is_split: bool = True,
        packed: bool = False,
        codes: bool = False,
        activations: Activations = "float32",
        rounded: bool = False,
    ) -> Module:
        """Reads the weights, and puts every device's part on the device.

        The host holds at most the parts of two parameters at a time, plus tensors of formats that must be
        dequantized, or two that are being packed.

        Args:
          mesh: the devices that the module is split over; one device by default.
          is_split: False puts the whole module on every device of the mesh.
          packed: keep weights as the checkpoint stores them where `packed_weights.py` can, which is for
            inference only (see `keeps_packed`). Otherwise every parameter is an array of its declared dtype.
          codes: also matrices in FP8 and INT4 on a GPU.
          activations: the format that activations are rounded to before products with packed weights; see
            `resolve_activations`.
          rounded: pack all matrices, those stored in more than 4 bits rounded to ggml's Q4_1.

        Raises:
          CheckpointError: a weight is NaN or infinite.
        """
        mesh = mesh or make_mesh()
        finite_check(self.parameters)()
        dense = self.parameters
        if packed:
            read = partial(stored_weight, codes=codes, activations=activations, rounded=rounded)
            with ThreadPoolExecutor(_PACKED_AT_ONCE) as pool:
                cut: list[str] = []
                put = partial(self._put_packed, read=read, mesh=mesh, is_split=is_split, cut=cut)
                is_put = list(pool.map(own_settings(mesh.devices.flat[0])(put), self.parameters))
            if cut:
                reason = f"{mesh.size} devices would cut their blocks"
                warnings.warn(f"{self.name}: dequantized, because {reason}: {_shown(cut)}", stacklevel=2)
            if codes and (unread := list(self._unread(is_put, cut))):
                reason = "no kernel reads them as they are stored"
                warnings.warn(f"{self.name}: dequantized, because {reason}: {_shown(unread)}", stacklevel=2)
            dense = [parameter for parameter, is_done in zip(dense, is_put, strict=True) if not is_done]
        before: Any = None
        for variable, stored in dense:
            # Copies to devices are asynchronous and keep their part in host memory: wait for the last one.
            jax.block_until_ready(before)
            source, array = source_of(variable, stored), variable.get_value()
            axes = variable.get_metadata("axes") if is_split else None
            place = sharding(mesh, axes, array.shape)
            if on_device(stored):
                (before,) = Conversion.of(variable, stored, place)([stored])
            else:
                tensors = [tensor.read() for tensor in stored]
                self._check_finite(tensors if source.kind == "float" else [], source, stored)
                like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
                before = from_host(source, tensors, like)
                del tensors  # before the next ones are read
            variable.set_value(before)
        return self.module

    def split(self, devices: int) -> dict[str, str]:
        """Which parameters devices would split, by the logical axis that is cut, and which are whole.

        A parameter goes by the name of its first tensor. Quantized ones are read as `read` reads them for a
        GPU; those dequantized because devices would cut their blocks have an entry of their own.
        """
        mesh = AbstractMesh((devices,), (MESH_AXIS,))
        found: dict[str, list[str]] = {}
        for variable, stored in self.parameters:
            source, array = variable.get_metadata("source"), variable.get_value()
            axes = variable.get_metadata("axes")
            spec = partition(mesh, axes, array.shape)
            by = next((str(axis) for axis, over in zip(axes or (), spec, strict=False) if over), None)
            where = "whole" if by is None else f"cut by {by}"
            weight = stored_weight(source, array.shape, array.dtype, stored, codes=True)
            if weight is not None and packed_sharding(weight, mesh, axes) is None:
                where += ", dequantized because its blocks would be cut"
            found.setdefault(where, []).append(source.tensors[0][0])
        return {where: _shown(names) for where, names in sorted(found.items())}

    def _unread(self, is_put: Sequence[bool], cut: Sequence[str]) -> Iterator[str]:
        """The matrices of layers in a bfloat16 network that have to be dense, except those in `cut`."""
        for (variable, stored), is_done in zip(self.parameters, is_put, strict=True):
            source, dtype = variable.get_metadata("source"), variable.get_value().dtype
            forms = {form for tensor in stored if (form := getattr(tensor, "form", None)) is not None}
            name = source.tensors[0][0]
            is_table = isinstance(source, Rows)
            if forms and not (is_done or is_table) and dtype == jnp.bfloat16 and name not in cut:
                yield f"{name} in {' and '.join(sorted(forms))}"

    def _put_packed(
        self,
        parameter: tuple[nnx.Variable, list[TensorSource]],
        *,
        read: Callable[..., Packed | None],
        mesh: Mesh,
        is_split: bool,
        cut: list[str],
    ) -> bool:
        """Puts a parameter on the devices as it is stored; False if it has to be dense.

        The first tensor of one that is dense because devices would cut its blocks is added to `cut`.
        """
        variable, stored = parameter
        source, array = variable.get_metadata("source"), variable.get_value()
        weight = read(source, array.shape, array.dtype, stored)
        if weight is None:
            return False
        self._check_finite(floats_of(weight), source, stored)
        axes = variable.get_metadata("axes") if is_split else None
        places = packed_sharding(weight, mesh, axes)
        if places is None:
            cut.append(source.tensors[0][0])
            return False
        variable.set_value(jax.block_until_ready(jax.device_put(weight, places)))
        return True

    def _check_finite(
        self, arrays: Sequence[np.ndarray], source: Source, stored: Sequence[TensorSource]
    ) -> None:
        if all(map(is_finite, arrays)):
            return
        names = (name for name, _ in source.tensors)
        name = next(name for name, tensor in zip(names, stored, strict=True) if not is_finite(tensor.read()))
        raise CheckpointError(f"{self.name}: tensor {name!r} holds NaN or infinity")


def _shown(names: Sequence[str]) -> str:
    """Names of parameters, those of several layers as one with their number."""
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" for name, count in sorted(kinds.items()))


def plan_update(
    module: nnx.Module,
    weights: Any,
    names: Names | None,
    *,
    prepare: Callable[[Checkpoint], Checkpoint],
    ignore: tuple[str, ...],
) -> Parameters:
    """Finds new values of a module's parameters in memory, without changing or reading any.

    Args:
      module: has its arrays.
      weights, names: see `jaxspec.load`.
      prepare: brings a checkpoint's tensors into the form that the module is loaded from.
      ignore: see `plan_module`.

    Raises:
      CheckpointError: an array is missing, unexpected or of another shape.
    """
    arrays = flatten(weights)
    if names is None and variables(module).keys() & arrays.keys():
        return whole_parameters(module, arrays)
    tensors = array_tensors(arrays, names, "weights")
    return _find(module, prepare(Checkpoint("weights", {}, tensors)), ignore)


def plan_module(
    make: Callable[[nnx.Rngs], Module], checkpoint: Checkpoint, *, ignore: tuple[str, ...] = ()
) -> ModulePlan[Module]:
    """Finds the tensors of every parameter of a module in a checkpoint.

    Args:
      make: the module's constructor; it is only evaluated for shapes.
      checkpoint: the checkpoint to search.
      ignore: name patterns of tensors that may be present but are not used; `*` matches anything.

    Raises:
      CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    module = nnx.eval_shape(lambda: make(NoKeys()))
    return ModulePlan(checkpoint.name, module, _find(module, checkpoint, ignore))


def _find(module: nnx.Module, checkpoint: Checkpoint, ignore: tuple[str, ...]) -> Parameters:
    """The tensors of every parameter of a module; see `plan_module`."""
    tensors = StrictTensors(checkpoint)
    tensors.ignore(*ignore)
    shared: dict[str, TensorSource] = {}

    def find(source: Source) -> list[TensorSource]:
        if not isinstance(source, HeadRows):
            return [tensors.take(name, shape, source.kind) for name, shape in source.tensors]
        ((name, shape),) = source.tensors
        if name not in shared:
            shared[name] = tensors.take(name, shape, source.kind)
        return [shared[name]]

    every = variables(module).values()
    parameters = [(variable, find(variable.get_metadata("source"))) for variable in every]
    tensors.finish()
    return parameters


def matching(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a checkpoint's tensors that match one of the patterns, sorted."""
    return tuple(n for n in sorted(checkpoint.tensors) if any(fnmatchcase(n, p) for p in patterns))


def export_tensors(module: nnx.Module) -> dict[str, np.ndarray]:
    """A module's parameters with the names and layouts of a checkpoint: the inverse of loading."""
    exported: dict[str, np.ndarray] = {}
    for variable, source in declared(module):
        value = np.asarray(variable.get_value())
        ((name, _), *_) = source.tensors
        if isinstance(source, HeadRows) and name in exported:
            source.put(exported[name], value)
            continue
        exported |= {
            name: array for (name, _), array in zip(source.tensors, source.split(value), strict=True)
        }
    return exported


def declared(module: nnx.Module) -> Iterator[tuple[nnx.Variable, Source]]:
    """Every parameter and buffer of a module, with its source in a checkpoint."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield node, node.get_metadata("source")
