"""Llama and SmolLM2. GGUFs of Mistral, which do not store its window, also load as Llama.

Source: the `LlamaForCausalLM` of transformers.
"""

from typing import ClassVar

from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder


class Llama(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 2048}
    gguf = GGUFArchitecture("llama", "LlamaForCausalLM", interleaved=True)
