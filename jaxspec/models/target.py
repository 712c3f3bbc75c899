"""Target networks of checkpoints: the family, its configuration, and a plan of the weights."""

import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxspec.config import ModelConfig
from jaxspec.files import Checkpoint, CheckpointError
from jaxspec.files.quantized.quantize import form_of, round_output_rows
from jaxspec.files.strict import hint_of_prefix
from jaxspec.jax_settings import own_settings
from jaxspec.models.decoder import Decoder
from jaxspec.models.language_model import language_model
from jaxspec.models.mtp_names import NEXT_LAYER
from jaxspec.models.registry import FAMILIES
from jaxspec.sharding import make_mesh
from jaxspec.weights.array_weights import Parameters, flatten, variables, whole_parameters
from jaxspec.weights.loading import IGNORED, ModulePlan, plan_module, plan_update
from jaxspec.weights.memory import Names, array_tensors
from jaxspec.weights.parameters import NoKeys

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_NEXT_LAYER = re.compile(r"(?P<root>model\.layers\.(?P<layer>[0-9]{1,9})\.)eh_proj\.weight")


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
    plan = plan_module(
        lambda rngs: make_target(config, dtype=dtype, rngs=rngs),
        _without_next_layers(config, checkpoint),
        ignore=_ignored(config),
    )
    if config.unread:
        unread = ", ".join(config.unread)
        warnings.warn(f"{checkpoint.name}: config.json: not read, unknown: {unread}", stacklevel=2)
    return plan


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
