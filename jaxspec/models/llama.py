"""Llama, SmolLM2, and the Mistral of GGUFs, which have no name for its window.

Source: the `LlamaForCausalLM` of transformers.
"""

from typing import ClassVar

from jaxspec.checkpoints.gguf_architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder


class Llama(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 2048}
    gguf = GGUFArchitecture("llama", interleaved=True)
