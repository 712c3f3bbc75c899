"""How GGUF files store the models of a family; each family describes its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.registry import Registry

if TYPE_CHECKING:  # imports slowly
    from jaxspec.files.gguf.tensor import GGUFTensor


def _nothing(*given: Any) -> dict[str, Any]:
    return {}


_MAX_EXPERTS = 4096


def check_experts(name: str, stack: "GGUFTensor") -> None:
    """Checks that a tensor stacks one matrix, or one bias, for each expert.

    Raises:
      CheckpointError: it has another rank, or more experts than any model.
    """
    rank = 2 if name.endswith(".bias") else 3
    if len(stack.shape) != rank or stack.shape[0] > _MAX_EXPERTS:
        raise CheckpointError(
            f"{stack.header.path}: {name!r} of shape {list(stack.shape)} is not what experts have"
        )


def split_experts(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Splits every stack of experts [E, …] into one tensor per expert, "….experts.{j}.…".

    Raises:
      CheckpointError: a stack does not have the shape of experts.
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


_ToHub = Callable[[Mapping[str, "GGUFTensor"], Mapping[str, Any]], dict[str, TensorSource]]


@dataclass(frozen=True)
class GGUFArchitecture:
    """How the GGUF files of a family differ from its checkpoints on the Hub.

    Attributes:
      name: the files' `general.architecture`, one that the `gguf` package knows.
      model_class: the class of the family in transformers and vLLM, for `architectures` in the `config.json`.
      layer_tensors: Hugging Face's names of tensors of a layer that Llama lacks; the `gguf` package maps them
        to names in the file. "mlp.experts.gate_proj" is a stack of experts.
      interleaved: the converter permuted query and key rows for Llama's interleaved rope.
      norm_offset: number that the converter added to the weights of norms.
      plain_norms: parts of the names of norms that it was not added to.
      has_rope: whether queries and keys are rotated; if not, what a file says of rope means nothing.
      scales: keys of factors that the family has and `config` reads; in files of others they are refused.
      other_name: another `general.architecture` that files of the family have; empty if there is none.
      config: reads the keys of `config.json` that Llama lacks, from metadata under "{name}.".
      from_tensors: further keys, from the keys so far and the file's tensors by their names there.
      tensors: converts tensors with stacked experts, by Hugging Face names, to those of a Hub checkpoint with
        the config that is also given.
      next_layer: names a tensor of the layers after the last, which draft, as such a checkpoint does: from
        the number of its layer, counted from the first of them, and its name there. None leaves them out.
    """

    name: str
    model_class: str = ""
    layer_tensors: tuple[str, ...] = ()
    interleaved: bool = False
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    has_rope: bool = True
    scales: tuple[str, ...] = ()
    other_name: str = ""
    config: Callable[[Metadata], dict[str, Any]] = _nothing
    from_tensors: Callable[[Mapping[str, Any], Mapping[str, "GGUFTensor"]], dict[str, Any]] = _nothing
    tensors: _ToHub = split_experts
    next_layer: Callable[[int, str], str] | None = None


ARCHITECTURES = Registry("jaxspec.models")
"""`model_type` and description by `general.architecture`; `jaxspec.register_family` fills it."""


def model_classes(config: Mapping[str, Any]) -> list[str]:
    """The `architectures` of a `config.json`; without them, the class of its `model_type`, if it is known."""
    stated = config.get("architectures")
    if isinstance(stated, list) and stated:
        return stated
    known = {model_type: each.model_class for model_type, each in ARCHITECTURES.values()}
    return [name] if (name := known.get(str(config.get("model_type")))) else []
