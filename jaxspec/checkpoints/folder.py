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
"""The subfolder of the weights in a folder written by `save_orbax`."""


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder written by Hugging Face's libraries or by `save_orbax`.

    Raises:
      CheckpointError: a file is missing or damaged, or the weights have an unsupported format.
    """
    config = read_json(folder / "config.json")
    quantization = _quantization(config, folder)
    tensors: Mapping[str, TensorSource]
    if (folder / ORBAX).is_dir():
        from jaxspec.checkpoints.orbax_folder import open_orbax  # imports jax

        tensors = open_orbax(folder / ORBAX)
    else:
        tensors = open_safetensors(folder)
        _check_not_packed(tensors, folder)
        if quantization.get("quant_method") == "mxfp4":
            tensors = expand_mxfp4(tensors, str(folder))
        if quantization.get("quant_method") == "fp8":
            tensors = expand_block_fp8(tensors, quantization, str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    generation = read_json(folder / "generation_config.json", default={})
    eos = _eos_token_ids(folder, generation, config, tokenizer)
    return Checkpoint(str(folder), config, tensors, tokenizer, eos, generation)


_EXPANDED = ("mxfp4", "fp8")
_PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes",
}
"""Tensor-name suffixes of formats that `config.json` need not mention."""


def _quantization(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The `quantization_config`; empty if weights are not quantised.

    Raises:
      CheckpointError: the quantisation is not supported.
    """
    nested = config.get("text_config")
    stated = config.get("quantization_config") or (
        nested.get("quantization_config") if isinstance(nested, dict) else None
    )
    if not stated:
        return {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{folder}: quantization_config must be an object, got {stated!r}")
    method = stated.get("quant_method")
    if method not in _EXPANDED:
        raise CheckpointError(
            f"{folder}: weights quantised by {method!r} (quant_method) are not supported; supported: "
            f"{', '.join(_EXPANDED)}"
        )
    return stated


def _check_not_packed(tensors: Mapping[str, TensorSource], folder: Path) -> None:
    for name in tensors:
        for suffix, method in _PACKED.items():
            if name.endswith(suffix):
                raise CheckpointError(
                    f"{folder}: tensor {name!r} was quantised by {method}, which is not supported; "
                    f"supported: {', '.join(_EXPANDED)}"
                )


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
