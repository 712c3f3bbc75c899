"""Reads what all heads' `config.json` share: their own layers, and the target's layers that they read."""

from collections.abc import Mapping
from typing import Any

from jaxspec.config import ConfigError, Keys, ModelConfig, joined

LAST_LAYER = "the last one, after the final norm"
"""What drafters that capture no hidden states read, in words."""


def layer_config(config: Mapping[str, Any], target: ModelConfig) -> Mapping[str, Any]:
    """The head's layers as a decoder's `config.json`, by default with the target's vocabulary.

    speculators nests these keys in `transformer_layer_config` and omits values that are the default of the
    class in transformers; those are filled in. The result remembers what is asked for, so the caller checks
    its keys.
    """
    config = config if isinstance(config, Keys) else Keys(config)
    vocabulary = {"vocab_size": target.vocab_size}
    if not is_speculators(config):
        return joined(vocabulary, config)
    layers = config.inner("transformer_layer_config")
    return joined(vocabulary, _CLASS_DEFAULTS.get(layers.get("model_type", "llama"), {}), layers)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a head is in the format of the speculators package."""
    return isinstance(config.get("transformer_layer_config"), Mapping)


def architecture(config: Mapping[str, Any]) -> str:
    """The class name in the producer's code; empty if the config has none."""
    return str((config.get("architectures") or [""])[0])


def captured_streams(ids: Any, depth: int, *, offset: int = 0) -> tuple[int, ...]:
    """The target's hidden states that a head reads; i is the stream before layer i.

    Args:
      ids: the list in the config.
      depth: the number of the target's layers.
      offset: 1 for a producer that counts the outputs of layers, 0 for one that counts their inputs.

    Raises:
      ConfigError: `ids` is not a list of integers, or the target has no such layer.
    """
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"the head's layer ids must be a list of integers, got {ids!r}")
    outside = [i for i in ids if not 0 <= i + offset <= depth]
    if outside:
        raise ConfigError(
            f"the head reads the target's layer {outside[0]}, but the target has {depth} layers"
        )
    return tuple(i + offset for i in ids)


def check_only(config: Mapping[str, Any], supported: Mapping[str, Any], title: str) -> None:
    """Checks keys that have one supported value each, which null and an absent key stand for, too.

    Raises:
      ConfigError: one has another value.
    """
    for key, value in supported.items():
        stated = config.get(key)
        if stated is not None and stated != value:
            raise ConfigError(f"{title}: {key} {stated!r} is not supported; supported: {value!r}")


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
