"""Qwen3-MoE: Qwen3 with routed experts.

Source: the `Qwen3MoeForCausalLM` of transformers.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind
from jaxspec.config import ModelConfig
from jaxspec.models.expert_sources import tensor_per_expert
from jaxspec.models.layers import MLP, DecoderLayer
from jaxspec.models.llama import Llama
from jaxspec.models.moe import MoE


class Qwen3Experts(MoE):
    """Experts with tensors of their own."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        moe = config.moe
        sources = tensor_per_expert(
            f"{name}.experts", moe.num_experts, config.hidden_size, moe.intermediate_size
        )
        super().__init__(config, f"{name}.gate", sources, router_bias=False, dtype=dtype, rngs=rngs)


class Qwen3Moe(Llama):
    """A target network."""

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        assert self.config.moe is not None
        mlp = MLP if index in self.config.moe.dense_layers else Qwen3Experts
        return DecoderLayer(self.config, f"model.layers.{index}", mlp=mlp, **args)
