"""Identifies the drafter in a checkpoint from its config and its tensor names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import (
    ConfigError,
    DrafterConfig,
    check_keys,
    is_configuration,
    load_config,
    resolve_config,
)
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.errors import page
from jaxspec.files import Checkpoint, open_checkpoint
from jaxspec.files.strict import hint_of_prefix
from jaxspec.spelling import known_names

DrafterChoice = str | Path | Mapping[str, Any] | DrafterConfig | Drafter
"""How to draft, as `jaxspec.load` takes it."""


def drafter_keys(drafter: DrafterChoice | None) -> Mapping[str, Any]:
    """The keys of `[drafter]` that `jaxspec.load`'s argument of that name stands for; none for None.

    A `Drafter` stands for no drafter of a configuration.

    Raises:
      ConfigError: a name that is neither a kind nor a configuration, nor could be a checkpoint, or one of a
        checkpoint that holds no known drafter.
      CheckpointError: the checkpoint cannot be opened.
    """
    if drafter is None or isinstance(drafter, Mapping):
        return drafter or {}
    if isinstance(drafter, DrafterConfig):
        return vars(drafter)
    if isinstance(drafter, Drafter):
        return {"kind": "none"}
    if not isinstance(drafter, str | Path):
        raise ConfigError(
            f"drafter must be a name, keys of [drafter], a DrafterConfig or a Drafter, got {drafter!r}"
        )
    name = str(drafter)
    if name in DRAFTERS:
        return {"kind": name}
    if is_configuration(name):
        return vars(load_config(name).drafter)
    try:
        source = resolve_config(name, others=[*DRAFTERS]).target.source
    except ConfigError as error:
        own = page("writing-a-drafter.md")
        raise ConfigError(f"drafter: {error}; your own: {own}") from None
    checkpoint = open_checkpoint(source)
    found = next(iter(identify(checkpoint)), None)
    if found not in DRAFTERS:
        own = page("writing-a-drafter.md")
        known = f"{known_names(found or '', DRAFTERS)}; your own: {own}"
        hint = "" if found else hint_of_prefix(checkpoint.tensors, "fc.weight", "midlayer.")
        raise ConfigError(f"{name} is {found or 'no drafter'}; {known}{hint}")
    return {"kind": found, "source": name, "file": None, "sha256": None}


def identify(checkpoint: Checkpoint) -> dict[str, str]:
    """The kinds of drafter that a checkpoint may hold, each with the producer of its format, likeliest first.

    A checkpoint of speculators names its kind, which may be one that is not supported.

    Raises:
      ConfigError: a value in its config has the wrong type or size.
    """
    config = checkpoint.config
    check_keys(config, f"{checkpoint.name}: config.json")
    depth = (config.get("transformer_layer_config") or config).get("num_hidden_layers") or 0
    count = len(checkpoint.tensors)
    if depth > count:
        raise ConfigError(f"{checkpoint.name}: num_hidden_layers is {depth}, but there are {count} tensors")
    stated = config.get("speculators_model_type")
    if isinstance(stated, str):
        return {stated: f"speculators {config.get('speculators_version') or ''}".strip()}
    # Kinds registered later come first: they may extend the format of an earlier kind.
    found = ((kind, DRAFTERS[kind].recognise(checkpoint)) for kind in reversed(list(DRAFTERS)))
    return {kind: producer for kind, producer in found if producer is not None}


def open_drafter(config: DrafterConfig, *, progress: bool = True) -> Checkpoint:
    """The checkpoint that `config` names; `progress` shows progress bars for a download.

    Raises:
      ConfigError: it holds a drafter of another kind.
      CheckpointError: it cannot be opened.
    """
    assert config.source is not None  # DrafterConfig checks it
    checkpoint = open_checkpoint(config.source, file=config.file, sha256=config.sha256, progress=progress)
    found = identify(checkpoint)
    if found and config.kind not in found:
        other = next(iter(found))
        known = DRAFTERS.get(other)
        what = f"{known.title}: use kind {other!r}" if known else f"a {other} head, which is not supported"
        raise ConfigError(f"drafter.kind is {config.kind!r}, but {checkpoint.name} is {what}")
    return checkpoint
