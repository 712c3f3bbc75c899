"""What kind of drafter a checkpoint is, and whose format it is in, by its config and the names in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoints import Checkpoint
from jaxspec.config import ConfigError, check_keys


@dataclass(frozen=True)
class Format:
    """Attributes:
    kind: as `DrafterConfig.kind`, or the name of a method that is not built.
    producer: whose format it is in.
    """

    kind: str
    producer: str


METHODS: Mapping[str, str] = {
    "eagle1": "an EAGLE-1 head",
    "eagle3": "an EAGLE-3 head",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash head",
    "mtp": "a model with multi-token-prediction layers",
    "draft_model": "a whole model",
}
"""What each kind is called; heads first."""


def identify(checkpoint: Checkpoint) -> Format | None:
    """The kind of drafter that a checkpoint holds; None where it is none that is known.

    Raises:
      ConfigError: a key of its config has a value of another type or size than it may have.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    check_keys(config, f"{checkpoint.name}: config.json")
    depth = (config.get("transformer_layer_config") or config).get("num_hidden_layers") or 0
    if depth > len(tensors):
        raise ConfigError(
            f"{checkpoint.name}: num_hidden_layers is {depth}, and there are {len(tensors)} tensors"
        )
    stated = config.get("speculators_model_type")
    if isinstance(stated, str):
        return Format(stated, f"speculators {config.get('speculators_version') or ''}".strip())
    architecture = str((config.get("architectures") or [""])[0])
    if "dflash_config" in config or architecture.startswith("DFlash"):
        second = architecture.startswith("DFlash2") or any(n.startswith("candidate_") for n in tensors)
        return Format("dflash2" if second else "dflash", "z-lab")
    if "mask_hidden" in tensors:
        return Format("peagle", "an EAGLE-3 layout with mask_hidden")
    if "layers.0.hidden_norm.weight" in tensors or any(n.startswith("midlayer.") for n in tensors):
        serving = "Eagle3" in architecture or "eagle_config" in config
        return Format("eagle3", "SpecForge or SGLang" if serving else "SafeAILab")
    if "fc.weight" in tensors and any(n.startswith("layers.0.") for n in tensors):
        return Format("eagle1", "SafeAILab")
    return _model(config, tensors)


def _model(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Format | None:
    if f"model.layers.{config.get('num_hidden_layers')}.eh_proj.weight" in tensors:
        return Format("mtp", f"model_type {config.get('model_type')}")
    if not any(name.endswith("embed_tokens.weight") for name in tensors) or "fc.weight" in tensors:
        return None
    return Format("draft_model", f"model_type {config.get('model_type')}")


def check_kind(kind: str, checkpoint: Checkpoint) -> None:
    """Raises ConfigError where a checkpoint is plainly a head of another kind than `kind`."""
    found = identify(checkpoint)
    # A model with prediction layers is a model too.
    if found is None or found.kind == kind or {found.kind, kind} == {"mtp", "draft_model"}:
        return
    what = METHODS.get(found.kind, f"a {found.kind} head, which is not supported")
    hint = f": use kind {found.kind!r}" if found.kind in METHODS else ""
    raise ConfigError(f"drafter.kind is {kind!r}, and {checkpoint.name} is {what}{hint}")
