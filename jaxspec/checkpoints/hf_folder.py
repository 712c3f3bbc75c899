"""A folder as Hugging Face writes it: config.json, safetensors files, tokenizer files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.json_file import read_json
from jaxspec.checkpoints.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor of an open safetensors file."""

    file: Any
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.key)


def open_hf_folder(folder: Path) -> Checkpoint:
    """Opens a folder with `config.json` and safetensors; a tokenizer is optional.

    Raises:
      CheckpointError: a file is missing or damaged, or the weights are in another form.
    """
    config = read_json(folder / "config.json")
    tensors: dict[str, SafetensorsTensor] = {}
    for path, keys in weight_files(folder).items():
        held = open_safetensors(path)
        for key in sorted(keys - set(held)):
            raise CheckpointError(f"{path}: tensor {key!r} is missing; {INDEX} places it there")
        for key in sorted(set(held) & set(tensors)):
            raise CheckpointError(f"{path}: tensor {key!r} is in two files")
        tensors |= held
    tokenizer = Tokenizer.from_folder(folder)
    return Checkpoint(str(folder), config, tensors, tokenizer, folder_eos(folder, config, tokenizer))


def folder_eos(folder: Path, config: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End tokens of `generation_config.json` or else `config.json`, and the tokenizer's own."""
    generation = read_json(folder / "generation_config.json", default={})
    stated = generation.get("eos_token_id")
    if stated is None:
        stated = config.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    return tuple(dict.fromkeys([*ids, *(tokenizer.eos_token_ids if tokenizer else ())]))


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of a folder, each with the tensors that the index places there."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map")
        files: dict[Path, set[str]] = {}
        for key, name in weight_map.items():
            files.setdefault(folder / Path(name).name, set()).add(key)
        return files
    single = folder / "model.safetensors"
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
        if pickled:
            raise CheckpointError(
                f"{pickled[0]}: pickled weights are not loaded; convert them to safetensors"
            )
        raise CheckpointError(f"{folder}: holds no *.safetensors file")
    return {path: set() for path in found}


def open_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of one file, none of them read.

    Raises:
      CheckpointError: missing, truncated or foreign, or a dtype that numpy cannot hold.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found")
    try:
        file = safetensors.safe_open(path, framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file: {error}") from None
    tensors = {}
    for key in file.keys():  # noqa: SIM118 - not a dict
        view = file.get_slice(key)
        if view.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {key!r} has dtype {view.get_dtype()}, which is not supported"
            )
        tensors[key] = SafetensorsTensor(file, key, tuple(view.get_shape()), _DTYPES[view.get_dtype()])
    return tensors
