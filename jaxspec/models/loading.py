"""Loads networks from checkpoints, and exports their weights."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxspec.checkpoints import Checkpoint, CheckpointError, StrictTensors, TensorSource
from jaxspec.checkpoints.finite import is_finite
from jaxspec.checkpoints.memory import Names, array_tensors
from jaxspec.checkpoints.quantize import form_of, round_output_rows
from jaxspec.checkpoints.strict import hint_of_prefix
from jaxspec.config import MESH_AXIS, ModelConfig
from jaxspec.jax_settings import own_settings
from jaxspec.models.array_weights import (
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
from jaxspec.models.decoder import Decoder
from jaxspec.models.language_model import language_model
from jaxspec.models.mtp_names import NEXT_LAYER
from jaxspec.models.packed_weights import Activations, Packed, floats_of, packed_sharding, stored_weight
from jaxspec.models.parameters import HeadRows, NoKeys, Rows, Source
from jaxspec.models.registry import FAMILIES
from jaxspec.sharding import make_mesh, partition, sharding

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

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_NEXT_LAYER = re.compile(r"(?P<root>model\.layers\.(?P<layer>[0-9]{1,9})\.)eh_proj\.weight")


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
        expanded, or two that are being packed.

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
                warnings.warn(f"{self.name}: expanded, because {reason}: {_shown(cut)}", stacklevel=2)
            if codes and (unread := list(self._unread(is_put, cut))):
                reason = "no kernel reads them as they are stored"
                warnings.warn(f"{self.name}: expanded, because {reason}: {_shown(unread)}", stacklevel=2)
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

        A parameter goes by the name of its first tensor. Quantised ones are read as `read` reads them for a
        GPU; those that would be expanded, because devices would cut their blocks, have an entry of their own.
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
                where += ", expanded because its blocks would be cut"
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


@own_settings()
def load_target(checkpoint: Checkpoint, *, dtype: jnp.dtype, mesh: Mesh | None = None) -> Decoder:
    """A target network with a checkpoint's weights, split over `mesh` (one device by default).

    Raises:
      ConfigError: the architecture is not supported.
      CheckpointError: a tensor is missing, unexpected, of another shape, or not finite.
    """
    mesh = mesh or make_mesh()
    return plan_target(checkpoint, dtype=dtype, devices=mesh.size).read(mesh)


def plan_target(
    checkpoint: Checkpoint,
    *,
    dtype: jnp.dtype,
    devices: int = 1,
    max_model_len: int | None = None,
    output_dtype: str | None = None,
) -> ModulePlan[Decoder]:
    """`load_target` for so many devices, without reading the weights; raises the same errors.

    Args:
      max_model_len: positions of the longest text; None takes as many as the model supports.
      output_dtype: "float8_e4m3fn" or "int4" rounds the output rows; the embedding stays as it is.
    """
    checkpoint = _one_matrix(language_model(checkpoint))
    if output_dtype is not None:
        tensors = round_output_rows(checkpoint.tensors, form_of(output_dtype))
        checkpoint = replace(checkpoint, tensors=tensors)
    config = target_config(checkpoint).over(devices).within(max_model_len)
    _check_depth(config.num_hidden_layers, checkpoint)
    return plan_module(
        lambda rngs: make_target(config, dtype=dtype, rngs=rngs),
        _without_next_layers(config, checkpoint),
        ignore=_ignored(config),
    )


def plan_weights(
    checkpoint: Checkpoint,
    weights: Any,
    names: Names | None,
    *,
    dtype: jnp.dtype,
    devices: int = 1,
    max_model_len: int | None = None,
) -> ModulePlan[Decoder]:
    """`plan_target` with weights in memory in place of the checkpoint's.

    Args:
      weights, names: see `jaxspec.load`.
    """
    arrays = flatten(weights)
    config = ModelConfig.from_hf(checkpoint.config)
    is_tied = config.tie_word_embeddings and "head.kernel" not in arrays
    shape = replace(config, tie_word_embeddings=is_tied).over(devices).within(max_model_len)
    module = nnx.eval_shape(lambda: make_target(shape, dtype=dtype, rngs=NoKeys()))
    if names is None and variables(module).keys() & arrays.keys():
        return ModulePlan("weights", module, whole_parameters(module, arrays))
    tensors = array_tensors(arrays, names, "weights")
    given = replace(checkpoint, name="weights", tensors=tensors)
    return plan_target(given, dtype=dtype, devices=devices, max_model_len=max_model_len)


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


def plan_target_update(target: Decoder, weights: Any, names: Names | None) -> Parameters:
    """`plan_update` of a target network."""
    return plan_update(
        target, weights, names, prepare=partial(decoder_tensors, target), ignore=_ignored(target.config)
    )


def decoder_tensors(model: Decoder, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names that a network is loaded by."""
    checkpoint = language_model(checkpoint)
    tensors = dict(checkpoint.tensors)
    if model.head is None and _EMBEDDING not in tensors and "lm_head.weight" in tensors:
        tensors[_EMBEDDING] = tensors.pop("lm_head.weight")
    return _without_next_layers(model.config, replace(checkpoint, tensors=tensors))


def _ignored(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the tensors that a target's loading ignores."""
    # Layers past the last one are read by the MTP drafter.
    further = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    family = FAMILIES[config.family]
    beside = [] if family.mtp_names is NEXT_LAYER else ["mtp.*"]
    return (*IGNORED, *family.ignored(config), *(f"model.layers.{i}.*" for i in further), *beside)


def _without_next_layers(config: ModelConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without layers for multi-token prediction that its config does not count."""
    if FAMILIES[config.family].mtp_names is not NEXT_LAYER:
        return checkpoint
    layers = [match for name in checkpoint.tensors if (match := _NEXT_LAYER.fullmatch(name))]
    roots = tuple(match["root"] for match in layers if int(match["layer"]) >= config.num_hidden_layers)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(roots)}
    return replace(checkpoint, tensors=tensors)


def _check_depth(num_layers: int, checkpoint: Checkpoint) -> None:
    """Checks that every layer is in the checkpoint, before that many layers are built.

    Raises:
      CheckpointError: a layer is missing.
    """
    matches = (_LAYER.match(name) for name in checkpoint.tensors)
    there = {int(match[1]) for match in matches if match}
    missing = next((layer for layer in range(num_layers) if layer not in there), None)
    if missing is not None:
        raise CheckpointError(
            f"{checkpoint.name}: num_hidden_layers is {num_layers}, but layer {missing} has no tensors"
            + hint_of_prefix(checkpoint.tensors, f"model.layers.{missing}.", f"layers.{missing}.")
        )


def make_target(config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> Decoder:
    """A target network of `config`'s family with random weights."""
    return FAMILIES[config.family](config, dtype=dtype, rngs=rngs)


def target_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a checkpoint's network.

    An output projection in the checkpoint is used even if `tie_word_embeddings` is set.

    Raises:
      ConfigError: the architecture is not supported.
    """
    config = ModelConfig.from_hf(checkpoint.config)
    tensors = _one_matrix(language_model(checkpoint)).tensors
    if config.moe is not None and getattr(FAMILIES[config.family].moe_type, "has_both_forms", False):
        is_stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
        config = replace(config, moe=replace(config.moe, is_stacked=is_stacked))
    return replace(config, tie_word_embeddings=False) if "lm_head.weight" in tensors else config


def _one_matrix(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in which a matrix that is embedding and output projection has the embedding's name."""
    tensors = dict(checkpoint.tensors)
    if _EMBEDDING in tensors or "lm_head.weight" not in tensors:
        return checkpoint
    if not ModelConfig.from_hf(checkpoint.config).tie_word_embeddings:
        return checkpoint
    tensors[_EMBEDDING] = tensors.pop("lm_head.weight")
    return replace(checkpoint, tensors=tensors)


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
