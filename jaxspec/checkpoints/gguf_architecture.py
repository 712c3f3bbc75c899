"""How GGUFs hold the models of a family, as each family says it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoints.checkpoint import TensorSource
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.gguf_metadata import Metadata

if TYPE_CHECKING:  # imports slowly
    from jaxspec.checkpoints.gguf_tensor import GGUFTensor


def _nothing(meta: Metadata) -> dict[str, Any]:
    return {}


_MAX_EXPERTS = 4096


def check_experts(name: str, stack: "GGUFTensor") -> None:
    """Refuses what is not one matrix, or one bias, for each of not too many experts.

    Raises:
      CheckpointError: another shape.
    """
    rank = 2 if name.endswith(".bias") else 3
    if len(stack.shape) != rank or stack.shape[0] > _MAX_EXPERTS:
        raise CheckpointError(
            f"{stack.header.path}: {name!r} of shape {list(stack.shape)} is not what experts have"
        )


def split_experts(tensors: Mapping[str, "GGUFTensor"]) -> dict[str, TensorSource]:
    """Every stack of experts [E, …] as the tensors of one expert each, "….experts.{j}.…".

    Raises:
      CheckpointError: a stack has another shape than experts have.
    """
    split: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        stem, found, leaf = name.partition(".experts.")
        if not found:
            split[name] = tensor
            continue
        check_experts(name, tensor)
        split |= {f"{stem}.experts.{j}.{leaf}": part for j, part in enumerate(tensor.parts())}
    return split


@dataclass(frozen=True)
class GGUFArchitecture:
    """Where the GGUFs of a family differ from its checkpoints on the Hub.

    Attributes:
      name: their `general.architecture`, one of those that the `gguf` package knows.
      layer_tensors: what Hugging Face calls the tensors of a layer, beside those of a Llama; how a file calls
        each, the `gguf` package says. "mlp.experts.gate_proj" is a stack of experts.
      interleaved: rows of queries and keys lie in pairs, for the rope of a Llama.
      norm_offset: what was added to the weights of norms.
      config: keys of `config.json` beside those of a Llama, from metadata under "{name}.".
      tensors: what a checkpoint on the Hub would hold, of tensors with its names whose experts are stacked.
    """

    name: str
    layer_tensors: tuple[str, ...] = ()
    interleaved: bool = False
    norm_offset: float = 0.0
    config: Callable[[Metadata], dict[str, Any]] = _nothing
    tensors: Callable[[Mapping[str, "GGUFTensor"]], dict[str, TensorSource]] = split_experts


ARCHITECTURES: dict[str, tuple[str, GGUFArchitecture]] = {}
"""`model_type` and description by `general.architecture`; `jaxspec.register_family` fills it."""
