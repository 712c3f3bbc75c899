"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window in the last layers.

Source: the `Qwen2ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder


class Qwen2(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
    gguf = GGUFArchitecture("qwen2", "Qwen2ForCausalLM")

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return layer >= config["max_window_layers"]

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The family's class in transformers ignores a file's attention_bias.
        return {"qkv_bias": True, "attention_bias": False}
