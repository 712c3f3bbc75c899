"""From a checkpoint to a network on the device, and back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.checkpoints import Checkpoint, StrictTensors
from jaxspec.config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.models.parameters import Source
from jaxspec.sharding import make_mesh, sharding

Module = TypeVar("Module", bound=nnx.Module)

# Buffers that older versions of transformers saved beside the weights.
IGNORED = ("*rotary_emb.inv_freq",)


def load_target(checkpoint: Checkpoint, *, dtype: jnp.dtype, mesh: Mesh | None = None) -> Llama:
    """A target network with a checkpoint's weights, split over `mesh` (one device by default).

    Raises:
      ConfigError: its architecture is not supported.
      CheckpointError: a tensor is missing, spare or misshaped.
    """
    config = target_config(checkpoint)
    return load_module(
        lambda rngs: Llama(config, dtype=dtype, rngs=rngs), checkpoint, mesh=mesh, ignore=IGNORED
    )


def target_config(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of a checkpoint's network; an output head that is there is used, whatever the flag says."""
    config = ModelConfig.from_hf(checkpoint.config)
    if "lm_head.weight" in checkpoint.tensors:
        return replace(config, tie_word_embeddings=False)
    return config


def load_module(
    make: Callable[[nnx.Rngs], Module],
    checkpoint: Checkpoint,
    *,
    mesh: Mesh | None = None,
    ignore: tuple[str, ...] = (),
) -> Module:
    """Makes a module and fills every parameter from where it says that a checkpoint keeps it.

    All names and shapes are checked before the first tensor is read.

    Args:
      make: the constructor; it is only evaluated for shapes.
      checkpoint: to read.
      mesh: the devices that the parameters are split over; one by default.
      ignore: names of tensors that may be there and are not used; `*` matches anything.

    Raises:
      CheckpointError: a tensor is missing, spare or misshaped.
    """
    mesh = mesh or make_mesh()
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    tensors = StrictTensors(checkpoint)
    tensors.ignore(*ignore)
    plan = [
        (variable, [tensors.take(name, shape, source.kind) for name, shape in source.tensors])
        for variable, source in declared(module)
    ]
    tensors.finish()
    for variable, stored in plan:
        joined = variable.get_metadata("source").join([tensor.read() for tensor in stored])
        array = np.ascontiguousarray(joined).astype(variable.get_value().dtype)
        axes = variable.get_metadata("axes")
        variable.set_value(jax.device_put(array, sharding(mesh, axes, array.shape)))
    return module


def export_tensors(module: nnx.Module) -> dict[str, np.ndarray]:
    """A module's parameters as a checkpoint names and lays them out: the inverse of `load_module`."""
    exported: dict[str, np.ndarray] = {}
    for variable, source in declared(module):
        arrays = source.split(np.asarray(variable.get_value()))
        exported |= {name: array for (name, _), array in zip(source.tensors, arrays, strict=True)}
    return exported


def declared(module: nnx.Module) -> Iterator[tuple[nnx.Variable, Source]]:
    """Every parameter and buffer of a module, with its place in a checkpoint."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield node, node.get_metadata("source")
