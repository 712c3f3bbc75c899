"""A folder with `config.json`, weights in safetensors or orbax, and perhaps a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.block_fp8 import expand_block_fp8
from jaxspec.checkpoints.checkpoint import Checkpoint, TensorSource
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.json_file import read_json
from jaxspec.checkpoints.mxfp4 import expand_mxfp4
from jaxspec.checkpoints.safetensors_files import open_safetensors
from jaxspec.checkpoints.tokenizer import Tokenizer

ORBAX = "orbax"
"""Subfolder of the weights in a folder that `save_orbax` wrote."""


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder as Hugging Face writes it, or as `save_orbax` does.

    Raises:
      CheckpointError: a file is missing or damaged, or the weights are in another form.
    """
    config = read_json(folder / "config.json")
    tensors: Mapping[str, TensorSource]
    if (folder / ORBAX).is_dir():
        from jaxspec.checkpoints.orbax_folder import open_orbax  # imports jax

        tensors = open_orbax(folder / ORBAX)
    else:
        tensors = open_safetensors(folder)
        quantization = config.get("quantization_config") or {}
        if quantization.get("quant_method") == "mxfp4":
            tensors = expand_mxfp4(tensors, str(folder))
        if quantization.get("quant_method") == "fp8":
            tensors = expand_block_fp8(tensors, quantization, str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    return Checkpoint(str(folder), config, tensors, tokenizer, _eos_token_ids(folder, config, tokenizer))


def _eos_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End tokens of `generation_config.json` or else `config.json`, and the tokenizer's own."""
    stated = read_json(folder / "generation_config.json", default={}).get("eos_token_id")
    if stated is None:
        stated = config.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id must be an integer or a list of them, got {stated!r}")
    return tuple(dict.fromkeys([*ids, *(tokenizer.eos_token_ids if tokenizer else ())]))
