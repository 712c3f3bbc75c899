"""The draft transformer's own keys inside a head's `config.json`."""

from collections.abc import Mapping
from typing import Any

from jaxspec.config import ModelConfig


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
