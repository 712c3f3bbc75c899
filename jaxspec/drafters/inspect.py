"""What a drafter's checkpoint is, which target it fits, which layers it reads, what loading assumes of it.

All of it comes from what loading uses: the same config readers and the same plan. No weights are read but
the map of a draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from jaxspec.checkpoints.hub import hub_folder, is_hub_id
from jaxspec.checkpoints.json_file import read_json
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig, SourceConfig
from jaxspec.drafters.dflash import DFlashConfig
from jaxspec.drafters.eagle1 import Eagle1Config
from jaxspec.drafters.eagle3 import Eagle3Config
from jaxspec.drafters.flags import Flag, family_flag, flags_of
from jaxspec.drafters.formats import METHODS, identify
from jaxspec.drafters.layer_config import is_speculators
from jaxspec.drafters.loading import HEAD_IGNORED, Build, plan_drafter
from jaxspec.drafters.mtp import COPIES, layer_name
from jaxspec.drafters.peagle import PEagleConfig
from jaxspec.models.loading import target_config


@dataclass(frozen=True)
class Report:
    """What is known of a drafter's checkpoint.

    Attributes:
      name: of the checkpoint.
      method: what it is.
      producer: whose format it is in.
      target: the targets that it fits.
      layers: the target's hidden states that it reads.
      flags: what was found and what is assumed.
      ignored: names of the tensors that loading leaves out.
      problem: why it cannot be loaded (for the given target, where there is one); None where it can.
    """

    name: str
    method: str
    producer: str
    target: str = "unknown"
    layers: str = "unknown"
    flags: tuple[Flag, ...] = ()
    ignored: tuple[str, ...] = ()
    problem: str | None = None


_HEADS: Mapping[str, Any] = {
    "eagle1": Eagle1Config,
    "eagle3": Eagle3Config,
    "peagle": PEagleConfig,
    "dflash": DFlashConfig,
}


def inspect(drafter: SourceConfig, target: SourceConfig | None = None) -> Report:
    """Looks at a drafter's checkpoint, and at whether it fits a target.

    Args:
      drafter: where its checkpoint is.
      target: where the target's is; of one on the Hub only `config.json` is fetched.

    Raises:
      CheckpointError: one of them cannot be opened, or holds no drafter that is known.
      ConfigError: the config of the target, or the sizes in the drafter's, cannot be read.
    """
    checkpoint = open_checkpoint(drafter.source, file=drafter.file, sha256=drafter.sha256)
    found = identify(checkpoint)
    if found is None:
        raise CheckpointError(f"{checkpoint.name}: neither a head that is known nor a whole model")
    report = Report(
        checkpoint.name,
        METHODS.get(found.kind, f"a {found.kind} head"),
        found.producer,
        ignored=tuple(n for n in sorted(checkpoint.tensors) if any(fnmatchcase(n, p) for p in HEAD_IGNORED)),
    )
    if found.kind not in METHODS:
        return replace(report, problem=f"{found.kind} is not supported")
    own = _stand_in(checkpoint) if found.kind in _HEADS else target_config(checkpoint)
    given = None if target is None else _read_target(target)
    report = replace(report, target=_fitting(found.kind, checkpoint, own))
    if found.kind == "draft_model":
        report = replace(report, layers="none")
    if found.kind == "mtp":
        copies = [n for n in sorted(checkpoint.tensors) if any(fnmatchcase(n, p) for p in _copies(own))]
        report = replace(report, layers=_LAST, flags=(family_flag(own),), ignored=tuple(copies))
    config = DrafterConfig(found.kind, 1, drafter.source, drafter.file, drafter.sha256)
    try:
        plan_drafter(config, given or own, Build(jnp.dtype(jnp.float32)))
    except (ConfigError, CheckpointError) as error:
        report = replace(report, problem=str(error))
    for fitting in (given, own) if found.kind in _HEADS else ():
        if fitting is not None:
            try:
                head = _HEADS[found.kind].from_hf(checkpoint.config, checkpoint.tensors, fitting)
            except ConfigError:
                continue
            layers = _layers(head, checkpoint, is_any=fitting is own)
            return replace(report, layers=layers, flags=tuple(flags_of(head, checkpoint)))
    return report


_ANY_DEPTH = 1 << 10
_LAST = "the last one, after the final norm"


def _copies(model: ModelConfig) -> list[str]:
    """Patterns of the tensors of a prediction layer that loading leaves out."""
    return [pattern.replace("*", layer_name(model), 1) for pattern in COPIES]


def _stand_in(checkpoint: Checkpoint) -> ModelConfig:
    """A target that a head fits as far as its own config says, deep enough for any layer it names."""
    config, tensors = checkpoint.config, checkpoint.tensors
    layers = config["transformer_layer_config"] if is_speculators(config) else config

    def length(name: str) -> int | None:
        return tensors[name].shape[0] if name in tensors else None

    sizes = {
        "hidden_size": config.get("target_hidden_size") or layers.get("hidden_size") or length("fc.weight"),
        # speculators leaves out the vocabulary where it is that of the class in transformers.
        "vocab_size": layers.get("vocab_size") or length("t2d") or config.get("draft_vocab_size"),
        "num_hidden_layers": config.get("num_target_layers") or _ANY_DEPTH,
    }
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise ConfigError(f"{checkpoint.name}: config.json: {key} must be an integer, got {value!r}")
    return ModelConfig.from_hf(
        {"model_type": "llama", "intermediate_size": 1, "num_attention_heads": 1, **sizes}
    )


def _read_target(source: SourceConfig) -> ModelConfig:
    if is_hub_id(source.source) and not Path(source.source).expanduser().exists():
        folder = hub_folder(source.source, "config.json")
        return ModelConfig.from_hf(read_json(folder / "config.json"))
    return target_config(open_checkpoint(source.source, file=source.file, sha256=source.sha256))


def _fitting(kind: str, checkpoint: Checkpoint, own: ModelConfig) -> str:
    """The targets that a drafter is for."""
    if kind == "mtp":
        return "the model itself"
    if kind == "draft_model":
        return f"any model whose vocabulary is the same one of {own.vocab_size} tokens"
    depth = "" if own.num_hidden_layers == _ANY_DEPTH else f", {own.num_hidden_layers} layers"
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    name = f": {verifier['name_or_path']}" if verifier.get("name_or_path") else ""
    return f"hidden size {own.hidden_size}, vocabulary {own.vocab_size}{depth}{name}"


def _layers(head: Any, checkpoint: Checkpoint, *, is_any: bool) -> str:
    """The hidden states that a head reads of the target that it was read for, or of any."""
    network = head.head if isinstance(head, PEagleConfig) else head
    capture = getattr(network, "capture", ())
    if not capture:
        return _LAST
    config = checkpoint.config
    named = isinstance(head, DFlashConfig) or any(
        (place or {}).get("eagle_aux_hidden_state_layer_ids")
        for place in (config, config.get("eagle_config"))
    )
    reason = "" if named else " (assumed: the default of all producers)"
    if not named and is_any:
        return f"those before layers 2, n/2 and n-3 of a target of n layers{reason}"
    return f"those before layers {', '.join(map(str, capture))}{reason}"
