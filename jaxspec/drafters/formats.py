"""Which kinds of drafter a checkpoint holds, by its config and the names in it."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checkpoints import Checkpoint, open_checkpoint
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.registry import KINDS


def identify(checkpoint: Checkpoint) -> dict[str, str]:
    """The kinds of drafter that a checkpoint holds, and whose format each is in; the likeliest first.

    A checkpoint of speculators names its kind, which may be one that is not built.

    Raises:
      ConfigError: a key of its config, of those that drafters read, has a value of another type.
    """
    config = checkpoint.config
    _check_types(config, checkpoint.name)
    stated = config.get("speculators_model_type")
    if isinstance(stated, str):
        return {stated: f"speculators {config.get('speculators_version') or ''}".strip()}
    # What was registered later knows what came before it, and may resemble it.
    found = ((kind, KINDS[kind].recognise(checkpoint)) for kind in reversed(KINDS))
    return {kind: producer for kind, producer in found if producer is not None}


def open_drafter(config: DrafterConfig) -> Checkpoint:
    """The checkpoint that `config` names.

    Raises:
      ConfigError: it plainly holds a drafter of another kind.
      CheckpointError: it cannot be opened.
    """
    assert config.source is not None  # DrafterConfig checks it
    checkpoint = open_checkpoint(config.source, file=config.file, sha256=config.sha256)
    found = identify(checkpoint)
    if found and config.kind not in found:
        other = next(iter(found))
        known = KINDS.get(other)
        what = f"{known.title}: use kind {other!r}" if known else f"a {other} head, which is not supported"
        raise ConfigError(f"drafter.kind is {config.kind!r}, and {checkpoint.name} is {what}")
    return checkpoint


_TYPES: Mapping[tuple[str, ...], tuple[str, Callable[[Any], bool]]] = {
    (
        "transformer_layer_config",
        "eagle_config",
        "dflash_config",
        "speculators_config",
        "verifier",
        "rope_parameters",
        "rope_scaling",
    ): ("an object", lambda value: isinstance(value, Mapping)),
    (
        "hidden_size",
        "target_hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
        "sliding_window",
        "num_hidden_layers",
        "num_target_layers",
        "max_position_embeddings",
    ): ("a positive integer", lambda value: type(value) is int and value > 0),
    ("rope_theta", "rms_norm_eps"): ("a number", lambda value: type(value) in (int, float)),
    ("layer_types", "architectures"): ("a list", lambda value: isinstance(value, list)),
    ("model_type", "rope_type"): ("a string", lambda value: isinstance(value, str)),
}


def _check_types(config: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError for a key, at any depth, whose value is neither null nor of its type."""
    for keys, (words, fits) in _TYPES.items():
        for key in keys:
            if config.get(key) is not None and not fits(config[key]):
                raise ConfigError(f"{name}: config.json: {key} must be {words}, got {config[key]!r}")
    for value in config.values():
        if isinstance(value, Mapping):
            _check_types(value, name)
