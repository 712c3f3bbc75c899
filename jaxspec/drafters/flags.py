"""What decides how a head computes: found in its checkpoint, or assumed, and why."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoints import Checkpoint
from jaxspec.config import ModelConfig
from jaxspec.drafters.dflash import DFlashConfig
from jaxspec.drafters.eagle1 import Eagle1Config
from jaxspec.drafters.eagle3 import Eagle3Config
from jaxspec.drafters.layer_config import is_speculators
from jaxspec.drafters.mtp import RECYCLES_NORMED
from jaxspec.drafters.peagle import MASK_TOKEN_KEYS, PEagleConfig

RECYCLED = "recycles the normed state"


@dataclass(frozen=True)
class Flag:
    """One choice, as loading takes it.

    Attributes:
      name: of the choice.
      value: what loading takes.
      found: the key or tensor that says so; None where nothing does.
      reason: why the value is assumed; empty where it was found.
    """

    name: str
    value: str
    found: str | None
    reason: str = ""


def flags_of(head: Any, checkpoint: Checkpoint) -> list[Flag]:
    """The flags of a head, whose values are those of `head`, the config that loading reads."""
    return list(_READERS[type(head)](head, checkpoint))


def family_flag(model: ModelConfig) -> Flag:
    """The one choice of a multi-token-prediction layer that no checkpoint states."""
    reason = f"vLLM runs the layer of {model.family} so"
    return Flag(RECYCLED, str(RECYCLES_NORMED.get(model.family, "unknown")), None, reason)


def _eagle1(head: Eagle1Config, checkpoint: Checkpoint) -> Iterator[Flag]:
    config, tensors = checkpoint.config, checkpoint.tensors
    reason = "heads of Llama 2 and Vicuna have fc.bias and no key for it"
    yield _key("fc bias", head.fc_bias, config, "bias", reason=reason)
    yield from _layers(head.layers, config)
    yield _tensor("token embedding", "its own", "the target's", tensors, "embed_tokens.weight")
    yield Flag("output head", "the target's", "EAGLE-1 has none of its own")


def _eagle3(head: Eagle3Config, checkpoint: Checkpoint) -> Iterator[Flag]:
    config, tensors = checkpoint.config, checkpoint.tensors
    speculators = is_speculators(config)
    reason = "speculators' EAGLE-3 heads are trained so" if speculators else "other producers' code does so"
    if "mask_hidden" in tensors:
        reason = "P-EAGLE heads are trained so"
    residual = head.norm_before_residual
    yield _key("norm before residual", residual, config, "norm_before_residual", reason=reason)
    yield _tensor("norm over all features", "yes", "no", tensors, "input_norm.weight")
    yield _tensor("norm per feature", "yes", "no", tensors, "fc_norm.0.weight")
    if speculators or "norm_output" not in config:
        reason = "only speculators' EAGLE-3.1 heads recycle the normed state"
        yield _key(RECYCLED, head.norm_output, config, "norm_output", reason=reason)
    else:
        reason = "outside speculators the key norm_output means the norm before the output head"
        yield Flag(RECYCLED, "False", None, reason)
    yield from _layers(head.layers, config)
    yield from _vocabulary(head.draft_vocab_size, checkpoint)


def _peagle(head: PEagleConfig, checkpoint: Checkpoint) -> Iterator[Flag]:
    key = next(key for key in MASK_TOKEN_KEYS if checkpoint.config.get(key) is not None)
    yield Flag("mask token", str(head.mask_token), key)
    yield from _eagle3(head.head, checkpoint)


def _dflash(head: DFlashConfig, checkpoint: Checkpoint) -> Iterator[Flag]:
    config = checkpoint.config
    nested = config.get("dflash_config") or {}
    merged = {**config, **nested}
    yield Flag("mask token", str(head.mask_token), "mask_token_id")
    yield _key(
        "block size", head.block_size, merged, "block_size", reason="the default of its producer's code"
    )
    if "sliding_attention" in head.layers.layer_types:
        speculators = is_speculators(config)
        keys = ("sliding_window_non_causal",) if speculators else ("causal", "is_causal")
        causal = ", ".join("causal" if c else "both ways" for c in head.causal)
        reason = "its producer's code makes windowed layers causal inside a block, and no others"
        yield _key("sight inside a block, by layer", causal, merged, *keys, reason=reason)
        window = "before the block" if head.window_before_block else "before each row"
        yield Flag("window counts positions", window, None, "its producer's attention mask does so")
    yield from _layers(head.layers, config)
    yield from _vocabulary(head.draft_vocab_size, checkpoint)


def _layers(layers: ModelConfig, config: Mapping[str, Any]) -> Iterator[Flag]:
    """Style and rope of a head's own layers."""
    nested = config["transformer_layer_config"] if is_speculators(config) else config
    if layers.qk_norm:
        by = "architectures" if "Qwen3" in str(config.get("architectures")) else "model_type"
        yield _key("layer style", "Qwen3 (norms on queries and keys)", {**config, **nested}, by, reason="")
    else:
        yield _key("layer style", "Llama", nested, "model_type", reason="EAGLE's heads are so by default")
    # transformers 5 nests what was two keys before.
    rope = {**(nested.get("rope_parameters") or {}), **nested}
    reason = "the default of the class that trains it; a head never takes the target's"
    yield _key("rope theta", layers.rope.theta, rope, "rope_theta", reason=reason)
    reason = "none is stated"
    yield _key("rope scaling", layers.rope.kind, rope, "rope_scaling", "rope_type", reason=reason)


def _vocabulary(draft_vocab_size: int, checkpoint: Checkpoint) -> Iterator[Flag]:
    config, tensors = checkpoint.config, checkpoint.tensors
    reason = "the target's vocabulary"
    yield _key("draft vocabulary", draft_vocab_size, config, "draft_vocab_size", reason=reason)
    yield _tensor("token embedding", "its own", "the target's", tensors, "embed_tokens.weight")
    yield _tensor("output head", "its own", "rows of the target's", tensors, "lm_head.weight")


_READERS: Mapping[type, Callable[[Any, Checkpoint], Iterator[Flag]]] = {
    Eagle1Config: _eagle1,
    Eagle3Config: _eagle3,
    PEagleConfig: _peagle,
    DFlashConfig: _dflash,
}


def _key(name: str, value: Any, config: Mapping[str, Any], *keys: str, reason: str) -> Flag:
    """A flag that a key of the config decides."""
    found = next((key for key in keys if config.get(key) is not None), None)
    return Flag(name, str(value), found, "" if found else reason)


def _tensor(name: str, present: str, absent: str, tensors: Mapping[str, Any], tensor: str) -> Flag:
    """A flag that a tensor decides by being there or not."""
    return Flag(name, present, tensor) if tensor in tensors else Flag(name, absent, f"no {tensor}")
