"""Safetensors: a single file, or shards with an index."""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.files.json_file import read_json

INDEX = "model.safetensors.index.json"

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
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
    """One tensor of a memory-mapped safetensors file: slicing it reads only the slice."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        size = math.prod(self.shape) * self.dtype.itemsize
        if not size:
            return np.empty(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.offset, (size,))
        return raw.view(np.ndarray).view(self.dtype).reshape(self.shape)


def open_safetensors(folder: Path) -> dict[str, TensorSource]:
    """The tensors of a folder, not read yet.

    Raises:
      CheckpointError: no safetensors, or a file is missing, damaged or does not match the index.
    """
    tensors: dict[str, TensorSource] = {}
    for name, keys in _files(folder).items():
        path = folder / name
        held = _open_file(path)
        if keys is not None and (missing := sorted(keys - set(held))):
            raise CheckpointError(f"{path}: tensor {missing[0]!r} is missing; {INDEX} places it there")
        if keys is not None and (spare := sorted(set(held) - keys)):
            raise CheckpointError(f"{path}: spare tensor {spare[0]!r}; {INDEX} does not place it there")
        if twice := sorted(set(held) & set(tensors)):
            raise CheckpointError(f"{path}: tensor {twice[0]!r} is in another file too")
        tensors |= held
    return tensors


def write_safetensors(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], shard_bytes: int | None = None
) -> None:
    """Writes arrays in order to files of at most `shard_bytes`, if a single array fits, and the index.

    None writes a single file.
    """
    shards: list[Path] = []
    weight_map: dict[str, int] = {}
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards)}.part"
        path.touch()
        mode = path.stat().st_mode
        safetensors.numpy.save_file(pending, path, metadata={"format": "pt"})
        path.chmod(stat.S_IMODE(mode))  # safetensors lets nobody else read its files
        weight_map.update(dict.fromkeys(pending, len(shards)))
        shards.append(path)
        pending.clear()

    for name, array in arrays:
        size = sum(a.nbytes for a in pending.values()) + array.nbytes
        if pending and shard_bytes is not None and size > shard_bytes:
            flush()
        pending[name] = np.ascontiguousarray(array)
        total += array.nbytes
    flush()
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for path, name in zip(shards, names, strict=True):
        path.rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {key: names[i] for key, i in sorted(weight_map.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _files(folder: Path) -> Mapping[str, set[str] | None]:
    """The files to open, each with its tensors by the index, or None without an index."""
    single = folder / "model.safetensors"
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map")
        placed: dict[str, set[str]] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str):
                raise CheckpointError(
                    f"{folder / INDEX}: places tensor {key!r} in {name!r}, which is no file"
                )
            # basename: the index must not lead to files outside of the folder.
            placed.setdefault(os.path.basename(name), set()).add(key)
        # transformers leaves the index of an earlier save in shards beside the single file of a later one.
        if single.name in placed or not single.is_file():
            return placed
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if found:
        return dict.fromkeys(path.name for path in found)
    if pickled := sorted(p for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth")):
        raise CheckpointError(f"{pickled[0]}: pickled weights are not loaded; convert them to safetensors")
    raise CheckpointError(f"{folder}: holds no *.safetensors file (pickled weights are not loaded)")


def _open_file(path: Path) -> dict[str, TensorSource]:
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found")
    with foreign(path, "not a complete safetensors file"):
        file = safetensors.safe_open(path, framework="np")
    tensors: dict[str, TensorSource] = {}
    starts = _starts(path)
    for key in file.keys():  # noqa: SIM118 - not a dict
        view = file.get_slice(key)
        dtype = view.get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {key!r} has dtype {dtype}, which is not supported")
        shape = tuple(view.get_shape())
        # numpy allows no such array, even with a dimension of 0
        if math.prod(max(n, 1) for n in shape) >= 2**59:
            raise CheckpointError(f"{path}: tensor {key!r} has shape {list(shape)}, which is too large")
        tensors[key] = SafetensorsTensor(path, starts[key], shape, _DTYPES[dtype])
    return tensors


def _starts(path: Path) -> dict[str, int]:
    """The offset of each tensor in a file that safetensors has validated."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {key: 8 + length + entry["data_offsets"][0] for key, entry in header.items()}
