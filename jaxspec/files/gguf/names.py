"""Hugging Face's names of the tensors of a GGUF, from the tables of the `gguf` package."""

import re
from collections.abc import Iterable
from functools import cache

import gguf

from jaxspec.files.errors import CheckpointError

_TOP = (
    "model.embed_tokens",
    "model.norm",
    "model.embedding_norm",
    "lm_head",
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_NEXT = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "post_attention_layernorm": "post_attention_norm",
}
"""Tensors of layers that draft, for architectures of which version 0.19 of the package lacks them."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(\.(?:weight|bias|scale))?")


def layer_of(name: str) -> int | None:
    """The layer of a tensor, from its name in the file; None for a tensor outside of the layers."""
    match = re.match(r"blk\.([0-9]{1,9})\.", name)
    return int(match[1]) if match else None


def hf_names(
    names: Iterable[str], architecture: str, layer_tensors: tuple[str, ...], file: str
) -> dict[str, str]:
    """Maps the names of a file's tensors to their Hugging Face names.

    Args:
      names: names in the file.
      architecture: `general.architecture`.
      layer_tensors: see `GGUFArchitecture`.
      file: the file, for messages.

    Raises:
      CheckpointError: a tensor that is not part of the architecture.
    """
    top, layer = _tables(architecture, layer_tensors)
    found = {}
    for name in names:
        match = _NAME.fullmatch(name)
        leaf = match and (layer if match[1] else top).get(match[2])
        if match is None or leaf is None:
            raise CheckpointError(f"{file}: tensor {name!r} is not part of the {architecture} architecture")
        prefix = f"model.layers.{match[1]}." if match[1] else ""
        found[name] = f"{prefix}{leaf}{match[3] or ''}"
    return found


@cache
def _tables(architecture: str, layer_tensors: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Hugging Face's names by the file's names: tensors outside of layers, and tensors of a layer."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], 1)

    def found(names: tuple[str, ...], *prefixes: str) -> dict[str, str]:
        known = {name: [table.get_name(f"{prefix}{name}") for prefix in prefixes] for name in names}
        stored = {name: next(filter(None, places), None) for name, places in known.items()}
        return {place.removeprefix("blk.0."): name for name, place in stored.items() if place}

    drafting = {_NEXT[name]: name for name in layer_tensors if name in _NEXT}
    of_layers = found((*_LAYER, *layer_tensors), "model.layers.0.", "backbone.layers.0.")
    return found(_TOP, ""), drafting | of_layers
