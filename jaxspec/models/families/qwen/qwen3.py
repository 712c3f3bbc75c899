"""Qwen3: Llama with norms on queries and keys, and an optional sliding window in the last layers.

Source: the `Qwen3ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder

QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class Qwen3(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
    gguf = GGUFArchitecture("qwen3", "Qwen3ForCausalLM", QK_NORMS)

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return layer >= config["max_window_layers"]

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"qk_norm": True}
