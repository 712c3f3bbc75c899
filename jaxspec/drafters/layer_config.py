"""What the `config.json` of every head says: the keys of its own layers, and the target's layers it reads."""

from collections.abc import Mapping
from typing import Any

from jaxspec.config import ConfigError, ModelConfig

LAST_LAYER = "the last one, after the final norm"
"""What a drafter reads that captures none of the target's inner hidden states."""


def layer_config(config: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
    """The keys of the layers as a decoder's `config.json` has them; the vocabulary is the target's.

    A head of speculators nests them in `transformer_layer_config` and leaves out what its class in
    transformers assumes, so that is filled in.
    """
    if not is_speculators(config):
        return {"vocab_size": target.vocab_size, **config}
    layers = dict(config["transformer_layer_config"])
    defaults = _CLASS_DEFAULTS.get(layers.get("model_type", "llama"), {})
    return {"vocab_size": target.vocab_size, **defaults, **layers}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a head is in the format of the speculators package."""
    return isinstance(config.get("transformer_layer_config"), Mapping)


def architecture(config: Mapping[str, Any]) -> str:
    """The class in the producer's code; empty where the config names none."""
    return str((config.get("architectures") or [""])[0])


def captured_streams(ids: Any, depth: int, *, offset: int = 0) -> tuple[int, ...]:
    """The target's hidden states that a head reads, i being the stream before layer i.

    Args:
      ids: the list in the config.
      depth: layers of the target.
      offset: 1 for a producer that counts the outputs of layers.

    Raises:
      ConfigError: the target has no such layer.
    """
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"the head's layer ids must be a list of integers, got {ids!r}")
    outside = [i for i in ids if not 0 <= i + offset <= depth]
    if outside:
        raise ConfigError(f"the head reads the target's layer {outside[0]}, and it has {depth} layers")
    return tuple(i + offset for i in ids)


_COMMON: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "intermediate_size": 11008, **_COMMON},
    "qwen3": {"intermediate_size": 22016, **_COMMON},
}
