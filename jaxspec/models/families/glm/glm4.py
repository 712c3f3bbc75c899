"""GLM-4-0414: norms before and after attention and feed-forward network, and partial rotary embedding.

Source: the `Glm4ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.files import CheckpointError
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.transformer import Attention, JoinedMLP, SandwichLayer


class Glm4Attention(Attention):
    """Attention with interleaved rope pairs."""

    rotates_neighbours = True


_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    # Multimodal models have three positions per token, and the converter reorders the rows of their q and k.
    if meta.list("rope.dimension_sections", int, None):
        raise CheckpointError(f"{meta.file}: metadata {meta.prefix}rope.dimension_sections is not supported")
    head_dim = meta.positive("attention.key_length", None)
    head_dim = head_dim or meta.size("embedding_length") // meta.size("attention.head_count")
    return {"partial_rotary_factor": meta.positive("rope.dimension_count", head_dim) / head_dim}


class Glm4(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    has_windows = False
    gguf = GGUFArchitecture(
        "glm4", "Glm4ForCausalLM", (*_NORMS[1::2], "mlp.gate_up_proj"), config=_gguf_config
    )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The class of transformers has no other biases, whatever a config says.
        return {
            "qkv_bias": bool(config["attention_bias"]),
            "attention_bias": False,
            "mlp_bias": False,
            "rope": RopeConfig.from_hf(config, partial=True),
        }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return SandwichLayer(
            config, f"model.layers.{index}", _NORMS, attention=Glm4Attention, mlp=JoinedMLP, **args
        )
