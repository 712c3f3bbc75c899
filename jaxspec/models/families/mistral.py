"""Mistral: Llama with, in some models, a sliding window in every layer.

Source: the `MistralForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.models.decoder import Decoder


class Mistral(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return True
