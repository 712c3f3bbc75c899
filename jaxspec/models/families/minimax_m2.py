"""MiniMax-M2: routed experts with sigmoid scores in every layer, partial rope, norms over all heads.

Source: the `MiniMaxM2ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flax import nnx

from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig, joined
from jaxspec.files import TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture, split_experts
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.deepseek.deepseek import GATING, DeepseekMoE, named_biases
from jaxspec.models.families.qwen.qwen3 import QK_NORMS
from jaxspec.models.layers.all_heads_norm import AllHeadsAttention
from jaxspec.models.layers.transformer import DecoderLayer
from jaxspec.weights.expert_sources import ExpertSources, tensor_per_expert

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor

_GATE, _DOWN, _UP = "w1", "w2", "w3"


class MiniMaxM2MoE(DeepseekMoE):
    """DeepSeek's experts without groups and shared ones, under Mixtral's names."""

    bias_name = "e_score_correction_bias"

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        return tensor_per_expert(name, count, width, inner, (_GATE, _UP, _DOWN))


class MiniMaxM2Layer(DecoderLayer):
    """A pre-norm layer."""

    mlp_name = "block_sparse_moe"


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    gating = meta.count("expert_gating_func", 0)
    return {
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "partial_rotary_factor": meta.size("rope.dimension_count") / meta.size("attention.key_length"),
        "scoring_func": GATING.get(gating, gating),
    }


def _gguf_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    return named_biases(split_experts(tensors, config))


_BUILT = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Keys of published files, and the only values that have an implementation in transformers."""


class MiniMaxM2(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    has_windows = False
    gguf = GGUFArchitecture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        (
            *QK_NORMS,
            "block_sparse_moe.gate",
            "block_sparse_moe.e_score_correction",
            *(f"block_sparse_moe.experts.{leaf}" for leaf in (_GATE, _UP, _DOWN)),
        ),
        config=_gguf_config,
        tensors=_gguf_tensors,
    )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, built in _BUILT.items():
            if config.get(key, built) != built:
                raise ConfigError(f"{key} {config[key]!r} is not supported; supported: {built}")
        # 1 is full attention, 0 the linear attention of MiniMax-Text-01.
        if set(config.get("attn_type_list") or ()) - {1}:
            raise ConfigError("attn_type_list with linear attention is not supported; supported: only 1")
        if (rotated := config.get("rotary_dim")) is not None:
            config = joined({"partial_rotary_factor": rotated / config["head_dim"]}, config)
        moe = MoeConfig(
            num_experts=config["num_local_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["intermediate_size"],
        )
        rope = RopeConfig.from_hf(config, default_theta=5e6, partial=True)
        return {"qk_norm": True, "attention_bias": False, "rope": rope, "moe": moe}

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        name = f"model.layers.{index}"
        return MiniMaxM2Layer(config, name, attention=AllHeadsAttention, mlp=MiniMaxM2MoE, **args)
