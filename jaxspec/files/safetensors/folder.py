"""A folder with `config.json`, weights in safetensors or orbax, and perhaps a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.files.checkpoint import Checkpoint, TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.json_file import read_json
from jaxspec.files.quantized.quantization import dequantized_tensors
from jaxspec.files.safetensors.tensors import open_safetensors
from jaxspec.files.text.tokenizer import Tokenizer

ORBAX = "orbax"
"""The subfolder of the weights in a folder written by `save_orbax`."""


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder written by Hugging Face's libraries or by `save_orbax`.

    Raises:
      CheckpointError: a file is missing or damaged, or the weights have an unsupported format.
    """
    config = read_json(folder / "config.json")
    tensors: Mapping[str, TensorSource]
    if (folder / ORBAX).is_dir():
        from jaxspec.files.orbax_folder import open_orbax  # imports jax

        tensors = open_orbax(folder / ORBAX)
    else:
        tensors = dequantized_tensors(open_safetensors(folder), config, folder)
    tokenizer = Tokenizer.from_folder(folder)
    generation = read_json(folder / "generation_config.json", default={})
    eos = _eos_token_ids(folder, generation, config, tokenizer)
    if tokenizer is not None:
        tokenizer.make_special(eos)
    return Checkpoint(str(folder), config, tensors, tokenizer, eos, generation)


def _eos_token_ids(
    folder: Path, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """End tokens of `generation_config.json`, else of `config.json`, and those of the tokenizer.

    A model that also takes images may name them with its language model (`text_config`).
    """
    nested = config.get("text_config")
    places = (generation, config, nested if isinstance(nested, dict) else {})
    stated = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id must be a token id or a list of them, got {stated!r}")
    return tuple(dict.fromkeys([*ids, *(tokenizer.eos_token_ids if tokenizer else ())]))
