"""A GGUF file as a checkpoint: Hugging Face names, layout and config."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.errors import page
from jaxspec.files.checkpoint import Checkpoint
from jaxspec.files.errors import CheckpointError
from jaxspec.files.gguf.architecture import ARCHITECTURES, GGUFArchitecture
from jaxspec.files.gguf.config import ROPE_FACTORS, config_from_gguf
from jaxspec.files.gguf.header import GGUFHeader, read_header
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.files.gguf.names import hf_names, layer_of
from jaxspec.files.gguf.parts import parts_of
from jaxspec.files.gguf.tensor import GGUFTensor, is_readable
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf

_HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF of a supported architecture; if it is split into several files, `path` is any of them.

    Raises:
      CheckpointError: not a GGUF, truncated, an unknown architecture, tensor or format, a vocabulary that
        does not fit, or missing metadata.
    """
    header = read_header(path)
    file = str(path)
    parts = _parts(path, header)
    meta = Metadata(file, parts[0].metadata)
    name = meta.text("general.architecture", None)
    if name is None or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{path}: architecture {name!r} is not supported; supported: {known}; "
            f"to add a family: {page('adding-a-family.md')}"
        )
    model_type, architecture = ARCHITECTURES[name]
    stored = _tensors(path, parts, meta)
    config = config_from_gguf(architecture, model_type, meta, stored)
    tokenizer = tokenizer_from_gguf(meta.values, file)
    num_tokens = len(meta.list("tokenizer.ggml.tokens", str, []))
    if num_tokens > config["vocab_size"]:
        raise CheckpointError(
            f"{path}: a vocabulary of {num_tokens} tokens does not fit an embedding of {config['vocab_size']}"
        )
    # Where a key is missing, transformers takes the family's default, which may be past a small vocabulary.
    for name in ("bos", "eos", "pad"):
        text = tokenizer and tokenizer.special_tokens.get(f"{name}_token")
        config[f"{name}_token_id"] = tokenizer.backend.token_to_id(text) if tokenizer and text else None
    stored = {name: tensor for name, tensor in stored.items() if name not in ROPE_FACTORS.values()}
    last, end = config["num_hidden_layers"], meta.under(architecture.name).size("block_count")
    if architecture.next_layer is None:
        stored = {name: tensor for name, tensor in stored.items() if layer_of(name) not in range(last, end)}
    names = hf_names(stored, architecture.name, architecture.layer_tensors, file)
    if architecture.next_layer is not None:
        names |= _next_names(names, range(last, end), architecture.next_layer)
    tensors = {
        names[name]: _as_converted(name, names[name], tensor, architecture, config)
        for name, tensor in stored.items()
    }
    eos = tokenizer.eos_token_ids if tokenizer else ()
    return Checkpoint(file, config, architecture.tensors(tensors, config), tokenizer, eos)


def _next_names(
    names: Mapping[str, str], layers: range, name_of: Callable[[int, str], str]
) -> dict[str, str]:
    """The names of the tensors of these layers, which are `GGUFArchitecture.next_layer`."""
    found = {name: (layer_of(name), hf_name) for name, hf_name in names.items()}
    return {
        name: name_of(layer - layers.start, hf_name.removeprefix(f"model.layers.{layer}."))
        for name, (layer, hf_name) in found.items()
        if layer is not None and layer in layers
    }


def _parts(path: Path, header: GGUFHeader) -> list[GGUFHeader]:
    """The headers of all files of a model; `path`, with `header`, is one of the files."""
    meta = Metadata(str(path), header.metadata)
    # Files that are not split may state 0 parts.
    count = meta.number("split.count", 1)
    if count <= 1:
        return [header]
    names = parts_of(path.name)
    if len(names) != count or path.name not in names:
        raise CheckpointError(f"{path}: one of {count} parts, but not named NAME-00001-of-{count:05.0f}.gguf")
    paths = [path.with_name(name) for name in names]
    headers = [header if part == path else read_header(part) for part in paths]
    for i, (part, each) in enumerate(zip(paths, headers, strict=True)):
        number = Metadata(str(part), each.metadata).number("split.no", None)
        if number != i:
            raise CheckpointError(f"{part}: metadata split.no is {number!r}, expected {i}")
    return headers


def _tensors(path: Path, parts: list[GGUFHeader], meta: Metadata) -> dict[str, GGUFTensor]:
    """All tensors by their names in the file, after checking their formats."""
    tensors: dict[str, GGUFTensor] = {}
    for header in parts:
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{header.path}: tensor {name!r} appears twice")
            if not is_readable(info.quantization):
                raise CheckpointError(
                    f"{header.path}: tensor {name!r} is {info.quantization.name}, which is not supported"
                )
            tensors[name] = GGUFTensor(header, info)
    stated = meta.number("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors, and it states {stated}")
    return tensors


def _as_converted(
    name: str, hf_name: str, tensor: GGUFTensor, architecture: GGUFArchitecture, config: Mapping[str, Any]
) -> GGUFTensor:
    """The tensor, marked with the converter's changes, which `read` undoes."""
    is_plain = any(part in hf_name for part in architecture.plain_norms)
    if architecture.norm_offset and "norm" in hf_name and not is_plain:
        return replace(tensor, offset=architecture.norm_offset)
    heads = next((config[key] for part, key in _HEADS.items() if f".{part}." in hf_name), 0)
    if not architecture.interleaved or not heads:
        return tensor
    if tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{tensor.header.path}: tensor {name!r} has {tensor.shape[0]} rows for {heads} heads"
        )
    return replace(tensor, interleaved_heads=heads)
