"""Llama, and SmolLM2.

Source: the `LlamaForCausalLM` of transformers.
"""

from typing import ClassVar

from jaxspec.models.decoder import Decoder


class Llama(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 2048}
