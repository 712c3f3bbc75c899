"""Phi-3 and Phi-4: Llama with fused projections, partial rotary embedding, and LongRoPE for long texts.

Source: the `Phi3ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jaxspec.config import ConfigError, ModelConfig, RopeConfig, joined
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.transformer import Attention, DecoderLayer, JoinedMLP


class Phi3Attention(Attention):
    """Attention whose projections are one tensor in a checkpoint."""

    is_joined = True


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    per_head = meta.size("embedding_length") // meta.size("attention.head_count")
    original = meta.positive("rope.scaling.original_context_length", None)
    return {
        "partial_rotary_factor": meta.positive("rope.dimension_count", per_head) / per_head,
        **({"original_max_position_embeddings": original} if original else {}),
    }


class Phi3(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    gguf = GGUFArchitecture(
        "phi3", "Phi3ForCausalLM", ("self_attn.qkv_proj", "mlp.gate_up_proj"), config=_gguf_config
    )

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return True

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # transformers ignores the key: all layers are alike.
        if config.get("sliding_window") and "full_attention" in (config.get("layer_types") or ()):
            raise ConfigError("layer_types: 'full_attention' is not supported beside a sliding_window")
        # As in transformers, older files call LongRoPE "su" or "yarn", and there are no biases.
        keys = ("rope_scaling", "rope_parameters")
        renamed = {key: _renamed(config[key]) for key in keys if config.get(key)}
        rope = RopeConfig.from_hf(joined(config, renamed), partial=True)
        return {"attention_bias": False, "mlp_bias": False, "rope": rope}

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        name = f"model.layers.{index}"
        return DecoderLayer(config, name, attention=Phi3Attention, mlp=JoinedMLP, **args)


def _renamed(rope: Mapping[str, Any]) -> dict[str, Any]:
    names = {key: "longrope" for key in ("type", "rope_type") if rope.get(key) in ("su", "yarn")}
    return {**rope, **names}
