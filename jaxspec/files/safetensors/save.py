"""Writing a checkpoint to a folder that `open_checkpoint` can read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm.auto import tqdm

from jaxspec.files.checkpoint import Checkpoint
from jaxspec.files.errors import CheckpointError
from jaxspec.files.quantized.codes import QuantizedTensor
from jaxspec.files.quantized.quantization import SETTINGS
from jaxspec.files.quantized.quantize import FORMATS, is_rounded, quantization_config, rounded
from jaxspec.files.safetensors.folder import ORBAX
from jaxspec.files.safetensors.llama3_rope import llama3_parameters
from jaxspec.files.safetensors.tensors import write_safetensors
from jaxspec.spelling import known_names

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes to which weights can be rounded when they are saved."""


def save_orbax(
    folder: str | Path, checkpoint: Checkpoint, *, dtype: str | None = None, progress: bool = True
) -> None:
    """Writes weights as orbax, with config and tokenizer; without `dtype`, weights are unchanged.

    Holds the whole model in memory.

    Args:
      folder: a new or empty folder.
      checkpoint: the model or head to write.
      dtype: rounds floating-point tensors to "float32", "float16" or "bfloat16"; None rounds nothing.
      progress: shows a progress bar.

    Raises:
      CheckpointError: the folder is not empty or cannot be written, or the dtype is unknown.
    """
    from jaxspec.files.orbax_folder import write_orbax  # imports jax

    folder = _new_folder(folder)
    write_orbax(folder / ORBAX, dict(_arrays(checkpoint, dtype, progress)))
    _write_metadata(folder, checkpoint, _config(checkpoint, dtype))


def save_safetensors(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    progress: bool = True,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes weights as safetensors, with config and tokenizer; otherwise like `save_orbax`.

    transformers and vLLM load the folder too.

    Args:
      quantize: rounds the matrices of layers to "fp8" or "int4", in the format of compressed-tensors (see
        `quantize.py`); None rounds none.
      shard_bytes: the largest size of a file, in bytes.
    """
    if quantize is not None:
        _check_rounded(checkpoint, quantize)
    folder = _new_folder(folder)
    config = _config(checkpoint, dtype)
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "factors":
        # Only jaxspec knows the type.
        config["rope_scaling"] = llama3_parameters(rope["factors"], config["rope_theta"]) or rope
    if quantize is not None:
        config["quantization_config"] = quantization_config(checkpoint.tensors, quantize)
    arrays = _arrays(checkpoint, dtype, progress, quantize)
    write_safetensors(folder, arrays, shard_bytes)
    _write_metadata(folder, checkpoint, config)


def _check_rounded(checkpoint: Checkpoint, quantize: str) -> None:
    if quantize not in FORMATS:
        raise CheckpointError(f"quantize {quantize!r} is not known; {known_names(quantize, FORMATS)}")
    if not any(is_rounded(name, tensor, quantize) for name, tensor in checkpoint.tensors.items()):
        raise CheckpointError(f"{checkpoint.name}: no matrix of a layer can be rounded to {quantize}")


def _new_folder(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be created: {error.strerror}") from None
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder}: the folder is not empty; nothing was written")
    return folder


def _arrays(
    checkpoint: Checkpoint, dtype: str | None, progress: bool, quantize: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; {known_names(dtype, DTYPES)}")
    # Dequantized weights are float32, which the model never was.
    own = [checkpoint.config.get(key) for key in ("dtype", "torch_dtype")]
    stated = next((each for each in own if isinstance(each, str) and each in DTYPES), "bfloat16")
    for name, tensor in tqdm(checkpoint.tensors.items(), desc="reading", unit="tensor", disable=not progress):
        array = tensor.read()
        if quantize is not None and is_rounded(name, tensor, quantize):
            yield from rounded(name, array, quantize)
            continue
        wanted = stated if isinstance(tensor, QuantizedTensor) and dtype is None else dtype
        if wanted is not None and array.dtype.kind not in "biu":
            array = array.astype(DTYPES[wanted])
        yield name, array


def _config(checkpoint: Checkpoint, dtype: str | None) -> dict[str, Any]:
    """The `config.json` of the weights as they are written: dequantized, and perhaps rounded."""
    config = {key: value for key, value in checkpoint.config.items() if key not in SETTINGS}
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config["text_config"] = nested = {k: v for k, v in nested.items() if k not in SETTINGS}
    if dtype is not None:
        config.setdefault("dtype" if "dtype" in config else "torch_dtype", dtype)
        for place in (config, nested if isinstance(nested, dict) else {}):
            place |= {key: dtype for key in ("dtype", "torch_dtype") if key in place}
    return config


def _write_metadata(folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Writes tokenizer and configs. `config.json` comes last, so a folder without it is unfinished."""
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(folder)
    generation = dict(checkpoint.generation)
    if checkpoint.eos_token_ids:
        generation["eos_token_id"] = list(checkpoint.eos_token_ids)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), "utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
