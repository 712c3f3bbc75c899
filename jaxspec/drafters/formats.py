"""Identifies the drafter in a checkpoint from its config and its tensor names."""

from jaxspec.checkpoints import Checkpoint, open_checkpoint
from jaxspec.config import ConfigError, DrafterConfig, check_keys
from jaxspec.drafters.registry import KINDS


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
    found = ((kind, KINDS[kind].recognise(checkpoint)) for kind in reversed(KINDS))
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
        known = KINDS.get(other)
        what = f"{known.title}: use kind {other!r}" if known else f"a {other} head, which is not supported"
        raise ConfigError(f"drafter.kind is {config.kind!r}, but {checkpoint.name} is {what}")
    return checkpoint
