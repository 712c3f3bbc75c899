"""The choices that decide how a head computes: found in its checkpoint, or assumed, with the reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.drafters.layer_config import is_speculators
from jaxspec.files import Checkpoint

RECYCLED = "recycles the normed state"


@dataclass(frozen=True)
class Flag:
    """One choice, with the value that loading uses.

    Attributes:
      name: the choice, in words.
      value: the value that loading uses, in words.
      found: the config key or tensor that decides it; None if the value is assumed.
      reason: why the value is assumed; empty if it was found.
    """

    name: str
    value: str
    found: str | None
    reason: str = ""


def key_flag(name: str, value: Any, config: Mapping[str, Any], *keys: str, reason: str) -> Flag:
    """A flag that the first of `keys` in the config decides; if none is there, it is assumed for `reason`."""
    found = next((key for key in keys if config.get(key) is not None), None)
    return Flag(name, str(value), found, "" if found else reason)


def tensor_flag(name: str, present: str, absent: str, tensors: Mapping[str, Any], tensor: str) -> Flag:
    """A flag that depends on whether the checkpoint has a tensor."""
    return Flag(name, present, tensor) if tensor in tensors else Flag(name, absent, f"no {tensor}")


def layer_flags(layers: ModelConfig, config: Mapping[str, Any]) -> Iterator[Flag]:
    """Style and rope of a head's own layers."""
    nested = config["transformer_layer_config"] if is_speculators(config) else config
    if layers.qk_norm:
        by = "architectures" if "Qwen3" in str(config.get("architectures")) else "model_type"
        style = "Qwen3 (norms on queries and keys)"
        yield key_flag("layer style", style, {**config, **nested}, by, reason="")
    else:
        yield key_flag("layer style", "Llama", nested, "model_type", reason="the default of EAGLE's heads")
    # transformers 5 nests two keys that were at the top level before.
    rope = {**(nested.get("rope_parameters") or {}), **nested}
    reason = "the default of the class that trains it; a head does not inherit the target's"
    yield key_flag("rope theta", layers.rope.theta, rope, "rope_theta", reason=reason)
    reason = "none is stated"
    yield key_flag("rope scaling", layers.rope.kind, rope, "rope_scaling", "rope_type", reason=reason)


def vocabulary_flags(draft_vocab_size: int, checkpoint: Checkpoint) -> Iterator[Flag]:
    """The tokens that a head drafts, and whether it has an embedding and an output head of its own."""
    config, tensors = checkpoint.config, checkpoint.tensors
    reason = "the target's vocabulary"
    yield key_flag("draft vocabulary", draft_vocab_size, config, "draft_vocab_size", reason=reason)
    yield tensor_flag("token embedding", "its own", "the target's", tensors, "embed_tokens.weight")
    yield tensor_flag("output head", "its own", "rows of the target's", tensors, "lm_head.weight")
